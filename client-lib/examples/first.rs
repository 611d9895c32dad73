//! A first program with both of its ends: `first listen` receives a message, `first` sends it.
//!
//! `cargo run --example first [listen]`, with siwd running on the embedded loopback.

use siw::{
    Access, CmChannel, CmEvent, CmListener, Context, Cq, QpInit, RecvWr, SendData, SendWr, Wc,
};

/// Sends 64 bytes, or receives them with the argument `listen`.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = Context::open(None)?;
    let pd = context.alloc_pd()?;
    let memory = pd.alloc_mr(64, Access::LOCAL_WRITE)?;
    let sges = [memory.slice(0..64)?];
    let cq = Cq::new(&context, 64, None)?;
    let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
    let channel = CmChannel::new(&context)?;
    if std::env::args().nth(1).as_deref() == Some("listen") {
        let _listener = CmListener::new(&channel, None, "10.77.0.2:7174".parse()?, 16, 0)?;
        if let CmEvent::ConnectRequest(request) = channel.get_event(None)? {
            qp.post_recv(&[RecvWr {
                wr_id: 1,
                sges: &sges,
            }])?;
            request.accept(&qp, None, &Default::default())?;
        }
    } else {
        qp.connect(&channel, "10.77.0.2:7174".parse()?, &Default::default())?;
        println!("{:?}", channel.get_event(None)?);
        qp.post_send(&[SendWr::send(1, SendData::Sges(&sges))])?;
    }
    let mut completions = [Wc::default()];
    cq.wait(&mut completions, None)?;
    println!("{}", completions[0].status.as_str());
    Ok(())
}
