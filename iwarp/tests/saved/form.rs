//! The serialised form of the types of siw-shm, siw-memory and siw-iwarp is that of `form.txt`.

use crate::common::*;
use serde::{Deserialize, Deserializer};
use serde_reflection::{
    ContainerFormat, Format, FormatHolder, Named, Registry, Samples, Tracer, TracerConfig,
    VariantFormat,
};
use siw_iwarp::mpa::{ConnectRequest, EnhancedData, MpaFrame, MpaInitiator, MpaResponder, RtrKind};
use siw_iwarp::port_mapper::PortMapperMessage;
use siw_iwarp::rdmap::atomic_header::AtomicOp;
use siw_iwarp::{
    CloseKind, CloseReason, FpduRun, MpaConfig, MpaError, NegotiatedParameters, QpEvent, QueuePair,
    QueuePairInfo, RingFault, TxRecord,
};
use siw_memory::queue_allocator::QueueAllocator;
use siw_memory::{Extent, ExtentMemory, KeyTable, ProcessMemory, RegisteredMemory, Retired, Stag};
use siw_shm::control::FinalSend;
use siw_shm::saved::{FORMAT, KeptResources, Saving};
use siw_shm::shared_memory::PageSize;
use siw_shm::{
    Access, AtomicArgs, CqGeometry, CqProducer, DoorbellConsumer, LowWaterMark, QpGeometry,
    RqConsumer, SendWqe, Sge, SharedMemory, SqConsumer, SrqConsumer, SrqGeometry, SrqRing,
    WcOpcode, WindowType, WorkerPage,
};
use std::fmt::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The form that is derived for a type, without the check of its contents: [`Tracer`] restores made-up values.
macro_rules! derived {
    ($name:ident, $of:ty) => {
        struct $name;

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <$of>::deserialize(deserializer).map(|_| $name)
            }
        }
    };
}
derived!(DerivedQueuePair, QueuePair);
derived!(DerivedRun, FpduRun);
derived!(DerivedSend, SendWqe);

/// Adds types to the registry, with all fields, and for each enum one more variant in each call.
macro_rules! trace_types {
    ($tracer:ident, $($of:ty),+ $(,)?) => {
        $($tracer.trace_type_once::<$of>(&Samples::new()).expect(stringify!($of));)+
    };
}

/// More than the largest enum has variants.
const ROUNDS: u32 = 40;

/// Shapes of all types. `enums`: their names.
fn trace_all(enums: &[String]) -> Registry {
    let mut tracer = Tracer::new(TracerConfig::default());
    for _ in 0..ROUNDS {
        trace_types!(
            tracer,
            DerivedQueuePair,
            DerivedRun,
            DerivedSend,
            MpaInitiator,
            MpaFrame
        );
        trace_types!(
            tracer,
            MpaResponder,
            MpaConfig,
            EnhancedData,
            ConnectRequest,
            MpaError
        );
        trace_types!(
            tracer,
            NegotiatedParameters,
            PortMapperMessage,
            QpEvent,
            RingFault
        );
        trace_types!(
            tracer,
            CloseKind,
            CloseReason,
            QueuePairInfo,
            KeptResources,
            FinalSend
        );
        trace_types!(
            tracer,
            LowWaterMark,
            PageSize,
            QpGeometry,
            CqGeometry,
            SrqGeometry
        );
        trace_types!(tracer, AtomicArgs, WcOpcode, Retired, RtrKind, AtomicOp);
        for name in enums {
            tracer.check_incomplete_enum(name);
        }
    }
    let (queue_pair, run) = queue_pair_and_run();
    let mut saving = Saving::default();
    saving.run(|| {
        let mut samples = Samples::new();
        let mut trace = |value: &dyn Traced| value.trace(&mut tracer, &mut samples);
        trace(&queue_pair);
        trace(&TxRecord::Fpdus(run));
        trace(&TxRecord::Stream(Box::from([0])));
        trace_rings(&mut trace);
        trace_memory(&mut trace);
    });
    tracer.registry_unchecked()
}

/// A value whose type the tracer learns from what it saves. It restores such a type only with its mappings.
trait Traced {
    fn trace(&self, tracer: &mut Tracer, samples: &mut Samples);
}

impl<T: serde::Serialize> Traced for T {
    fn trace(&self, tracer: &mut Tracer, samples: &mut Samples) {
        tracer.trace_value(samples, self).expect("it can be saved");
    }
}

/// A queue pair that has sent a message of several elements, and the run that was last handed out.
fn queue_pair_and_run() -> (QueuePair, FpduRun) {
    let mut end = End::new(negotiated(true));
    let (key, _) = end.env.mr(0, 4096, REMOTE);
    let parts = [sge(0, 10, key); 3];
    let request = siw_shm::SendData::Sges(&parts);
    end.env.post(&wr(siw_shm::Opcode::Send, 1, request));
    let (runs, _) = end.pull_runs(usize::MAX, 100);
    (end.qp, runs[0])
}

fn trace_rings(trace: &mut impl FnMut(&dyn Traced)) {
    let memory = Arc::new(SharedMemory::new_anonymous(1 << 16).expect("memory"));
    let (of_rings, at) = (|| memory.clone(), 0);
    let send = SqConsumer::new(of_rings(), at, 4).expect("inside");
    trace(&send.with_state_line(of_rings(), 4096).expect("inside"));
    trace(&RqConsumer::new(of_rings(), at, 4).expect("inside"));
    let geometry = CqGeometry::new(4, 1).expect("small");
    trace(&CqProducer::new(of_rings(), at, geometry, 0).expect("inside"));
    trace(&DoorbellConsumer::new(of_rings(), at, 4).expect("inside"));
    trace(&WorkerPage::create_sealed(1).expect("memory"));
    let geometry = SrqGeometry::new(4, 1).expect("small");
    let ring = || SrqRing::new(of_rings(), at, geometry).expect("inside");
    let first = ring();
    first.append_ring(ring());
    trace(&SrqConsumer::new(first, Arc::default()));
}

fn trace_memory(trace: &mut impl FnMut(&dyn Traced)) {
    // Of its own for each object, so that each one carries its memory.
    let new = || Arc::new(SharedMemory::new_anonymous(1 << 16).expect("memory"));
    let file: OwnedFd = std::fs::File::open("/proc/self/mem").expect("proc").into();
    let process = Arc::new(ProcessMemory::new(file));
    let extents = [ExtentMemory::Shared(new()), ExtentMemory::Process(process)];
    let extents = extents.map(|memory| Extent {
        memory,
        offset: 0,
        len: 8,
    });
    let access = Access::NONE;
    let plain = RegisteredMemory::new(new(), 0, 8, 0, PD, None, access);
    let fast = RegisteredMemory::new_fast(new(), 2, new(), 0, PD);
    let scattered = RegisteredMemory::new_scattered(extents.into(), 16, 0, PD, access);
    let keys = KeyTable::new(8, 1);
    for memory in [plain, fast, scattered] {
        let memory = memory.expect("inside");
        trace(&memory);
        keys.insert(memory).expect("room");
    }
    for kind in [WindowType::One, WindowType::Two] {
        let window = RegisteredMemory::new_window(PD, kind);
        keys.insert(window).expect("room");
    }
    trace(&*keys);
    trace(&Stag(1));
    let mut queues = QueueAllocator::new(PageSize::Normal, 1 << 30, 1);
    let [one, two] = [64, 5 << 20].map(|len| queues.alloc(len).expect("memory"));
    let _ = queues.give(&one);
    trace(&one);
    queues.free(one);
    queues.free(two);
    let _not_given = queues.alloc(1 << 20).expect("memory");
    trace(&queues);
    trace(&Sge::default());
}

/// One line for each type.
fn describe(registry: &Registry) -> String {
    let mut text = format!("FORMAT {FORMAT}\n");
    for (name, format) in registry {
        let _ = match format {
            ContainerFormat::UnitStruct => writeln!(text, "{name} = ()"),
            ContainerFormat::NewTypeStruct(of) => writeln!(text, "{name} = {}", describe_value(of)),
            ContainerFormat::TupleStruct(parts) => {
                writeln!(text, "{name} = ({})", describe_parts(parts))
            }
            ContainerFormat::Struct(fields) => {
                writeln!(text, "{name} = {{ {} }}", describe_fields(fields))
            }
            ContainerFormat::Enum(variants) => {
                let numbers = variants.keys().copied();
                assert!(numbers.eq(0..variants.len() as u32), "all of {name}");
                let variants = variants.iter().map(|(number, variant)| {
                    let contents = describe_variant(&variant.value);
                    format!("{number} {}{contents}", variant.name)
                });
                writeln!(
                    text,
                    "{name} = {}",
                    variants.collect::<Vec<_>>().join(" | ")
                )
            }
        };
    }
    text
}

fn describe_variant(format: &VariantFormat) -> String {
    let mut known = format.clone();
    known.reduce();
    match &known {
        VariantFormat::NewType(of) => format!("({})", describe_value(of)),
        VariantFormat::Tuple(parts) => format!("({})", describe_parts(parts)),
        VariantFormat::Struct(fields) => format!(" {{ {} }}", describe_fields(fields)),
        VariantFormat::Unit | VariantFormat::Variable(_) => String::new(),
    }
}

fn describe_fields(fields: &[Named<Format>]) -> String {
    let fields = fields.iter();
    let fields = fields.map(|field| format!("{}: {}", field.name, describe_value(&field.value)));
    fields.collect::<Vec<_>>().join(", ")
}

fn describe_parts(parts: &[Format]) -> String {
    parts
        .iter()
        .map(describe_value)
        .collect::<Vec<_>>()
        .join(", ")
}

fn describe_value(format: &Format) -> String {
    let mut known = format.clone();
    known.reduce();
    match &known {
        // Never seen: the second reference to an object that has been saved.
        Format::Variable(_) => "_".to_string(),
        Format::TypeName(name) => name.clone(),
        Format::Option(of) => format!("{}?", describe_value(of)),
        Format::Seq(of) => format!("[{}]", describe_value(of)),
        Format::Map { key, value } => {
            format!("[{}: {}]", describe_value(key), describe_value(value))
        }
        Format::Tuple(parts) => format!("({})", describe_parts(parts)),
        Format::TupleArray { content, size } => format!("[{}; {size}]", describe_value(content)),
        primitive => format!("{primitive:?}").to_lowercase(),
    }
}

/// An older process that is upgraded saves one form, and the newer one restores the other.
#[test]
fn the_serialised_form_changes_only_with_the_version() {
    let is_enum = |(_, format): &(_, _)| matches!(format, ContainerFormat::Enum(_));
    let enums = trace_all(&[]).into_iter().filter(is_enum);
    let enums: Vec<String> = enums.map(|(name, _)| name).collect();
    let form = describe(&trace_all(&enums));
    let expected = include_str!("form.txt");
    assert!(
        form == expected,
        "the serialised form is not that of tests/saved/form.txt: raise siw_shm::saved::FORMAT, unless the \
         form of this version has never been released, and write into the file:\n{form}"
    );
}
