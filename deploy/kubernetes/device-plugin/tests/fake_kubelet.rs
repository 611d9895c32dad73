//! The plugin against a kubelet of this test: registration, the list of devices, allocation, a siwd that
//! ends, and a kubelet that restarts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use siw_device_plugin::api::services::device_plugin_client::DevicePluginClient;
use siw_device_plugin::api::services::registration_server::{Registration, RegistrationServer};
use siw_device_plugin::api::{
    AllocateRequest, ContainerAllocateRequest, Device, Empty, HEALTHY, RegisterRequest, UNHEALTHY,
};
use siw_device_plugin::{Node, Settings, run};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Request, Response, Status};

const PATIENCE: Duration = Duration::from_secs(20);

/// Passes registrations on.
struct Kubelet(mpsc::UnboundedSender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(Empty {}))
    }
}

/// Starts a kubelet, which removes the sockets of its predecessor's plugins.
fn start_kubelet(
    folder: &Path,
    register: mpsc::UnboundedSender<RegisterRequest>,
) -> JoinHandle<()> {
    for entry in std::fs::read_dir(folder).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let listener = UnixListener::bind(folder.join("kubelet.sock")).unwrap();
    tokio::spawn(async move {
        let service = RegistrationServer::new(Kubelet(register));
        let incoming = UnixListenerStream::new(listener);
        let server = Server::builder().add_service(service);
        server.serve_with_incoming(incoming).await.unwrap();
    })
}

/// The control socket of a siwd.
fn start_siwd(path: &Path) -> OwnedFd {
    let _ = std::fs::remove_file(path);
    let made = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&made, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&made, 64).unwrap();
    made
}

async fn connect(path: PathBuf) -> DevicePluginClient<Channel> {
    let channel = Endpoint::from_static("http://plugin")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        }))
        .await
        .unwrap();
    DevicePluginClient::new(channel)
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("in time")
}

fn ids(devices: &[Device]) -> Vec<&str> {
    devices.iter().map(|device| device.id.as_str()).collect()
}

fn all_have(devices: &[Device], health: &str) -> bool {
    !devices.is_empty() && devices.iter().all(|device| device.health == health)
}

#[tokio::test]
async fn pods_get_the_devices_of_a_running_siwd() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("device-plugins");
    std::fs::create_dir(&folder).unwrap();
    let spec = place.path().join("siwd.json");
    let text = r#"{ "cdiVersion": "0.5.0", "kind": "siwd.dev/rnic",
        "devices": [{ "name": "siw0" }, { "name": "siw1" }, { "name": "all" }] }"#;
    std::fs::write(&spec, text).unwrap();
    let siwd_path = place.path().join("siwd.sock");
    let siwd = start_siwd(&siwd_path);
    let (register, mut registered) = mpsc::unbounded_channel();

    // The plugin may start before the kubelet.
    let plugin = tokio::spawn(run(Settings {
        folder: folder.clone(),
        resource: "siwd.dev/rnic".to_owned(),
        node: Node {
            spec: spec.clone(),
            socket: siwd_path.clone(),
            shares: 2,
        },
        interval: Duration::from_millis(20),
    }));
    let kubelet = start_kubelet(&folder, register.clone());
    let request = soon(registered.recv()).await.unwrap();
    assert_eq!(request.version, "v1beta1");
    assert_eq!(request.resource_name, "siwd.dev/rnic");

    let mut client = connect(folder.join(&request.endpoint)).await;
    let options = client.get_device_plugin_options(Empty {}).await.unwrap();
    assert!(!options.into_inner().pre_start_required);
    let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let first = soon(lists.message()).await.unwrap().unwrap().devices;
    assert_eq!(ids(&first), ["siw0-0", "siw0-1", "siw1-0", "siw1-1"]);
    assert!(all_have(&first, HEALTHY), "{first:?}");

    let ask = |ids: &[&str]| AllocateRequest {
        container_requests: vec![ContainerAllocateRequest {
            devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        }],
    };
    // Two units of a device are one device.
    let given = client.allocate(ask(&["siw1-0", "siw1-1", "siw0-1"])).await;
    let given = given.unwrap().into_inner().container_responses;
    let names: Vec<_> = given[0]
        .cdi_devices
        .iter()
        .map(|cdi| cdi.name.as_str())
        .collect();
    assert_eq!(names, ["siwd.dev/rnic=siw1", "siwd.dev/rnic=siw0"]);
    for wrong in ["siw9-0", "siw0-2", "siw0", "all-0"] {
        let refused = client.allocate(ask(&[wrong])).await.unwrap_err();
        assert!(refused.message().contains(wrong), "{refused}");
    }

    // siwd ends and starts again; its socket file stays behind.
    drop(siwd);
    let lost = soon(lists.message()).await.unwrap().unwrap().devices;
    assert!(all_have(&lost, UNHEALTHY), "{lost:?}");
    let _siwd = start_siwd(&siwd_path);
    let back = soon(lists.message()).await.unwrap().unwrap().devices;
    assert!(all_have(&back, HEALTHY), "{back:?}");
    // Another configuration has other devices.
    std::fs::write(&spec, text.replace("siw1", "rnic7")).unwrap();
    let changed = soon(lists.message()).await.unwrap().unwrap().devices;
    assert_eq!(ids(&changed), ["siw0-0", "siw0-1", "rnic7-0", "rnic7-1"]);

    // The kubelet restarts.
    kubelet.abort();
    let _ = kubelet.await;
    while registered.try_recv().is_ok() {}
    let _kubelet = start_kubelet(&folder, register);
    let again = soon(registered.recv()).await.unwrap();
    let mut client = connect(folder.join(&again.endpoint)).await;
    let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let listed = soon(lists.message()).await.unwrap().unwrap().devices;
    assert!(all_have(&listed, HEALTHY), "{listed:?}");
    plugin.abort();
}
