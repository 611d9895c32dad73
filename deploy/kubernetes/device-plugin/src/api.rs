//! Messages of the kubelet's device plugin API, v1beta1 (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1).
//! Fields that siwd does not use are left out; protobuf skips them.

/// Version of the API.
pub const VERSION: &str = "v1beta1";
/// Health of a device that pods can be given.
pub const HEALTHY: &str = "Healthy";
/// Health of a device that no pod is given.
pub const UNHEALTHY: &str = "Unhealthy";

/// A message without fields.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Empty {}

/// Optional calls of the kubelet; siwd needs none.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct DevicePluginOptions {
    /// PreStartContainer is called.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// GetPreferredAllocation is called.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// Announces a plugin to the kubelet.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegisterRequest {
    /// [`VERSION`]
    #[prost(string, tag = "1")]
    pub version: String,
    /// Name of the plugin's socket in the kubelet's folder.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// Extended resource: `siwd.dev/rnic`.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// Optional calls.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// All devices, sent at first and after each change.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListAndWatchResponse {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// One unit of the resource.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Device {
    /// Unique name.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
}

/// Devices for the containers of a pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// Devices for one container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerAllocateRequest {
    /// [`Device::id`] of each.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// Changes of the containers of a pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AllocateResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// Changes of one container: what the CDI specification says of its devices.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerAllocateResponse {
    /// The devices.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A device of a CDI specification.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CdiDevice {
    /// Qualified name: `siwd.dev/rnic=siw0`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Clients and servers.
#[allow(missing_docs, reason = "generated")]
pub mod services {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.Registration.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1beta1.DevicePlugin.rs"));
}
