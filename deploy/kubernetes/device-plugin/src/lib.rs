//! Kubernetes device plugin of siwd. Each node's siwd writes its devices into a CDI specification
//! (`siwctl cdi`); this plugin announces them to the kubelet as the resource `siwd.dev/rnic`, and has the
//! container runtime apply the specification to the pods that ask for it.
//!
//! A device serves any number of programs, so it is announced as many times as pods may share it. While
//! siwd does not run, its devices are unhealthy and no pod is scheduled; running pods keep theirs, see
//! DEVICE_FATAL, and connect again.

pub mod api;
mod node;
mod plugin;

pub use node::Node;
pub use plugin::{Settings, run};
