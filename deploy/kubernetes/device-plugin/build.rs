//! Generates clients and servers of the kubelet's device plugin API, v1beta1. Its messages are in
//! `src/api.rs`, so that no protoc is needed.

use tonic_build::manual::{Builder, Method, Service};

fn method(name: &str, route: &str, input: &str, output: &str, streams: bool) -> Method {
    let method = Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{input}"))
        .output_type(format!("crate::api::{output}"))
        .codec_path("tonic_prost::ProstCodec");
    if streams {
        method.server_streaming().build()
    } else {
        method.build()
    }
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let registration = Service::builder()
        .name("Registration")
        .package("v1beta1")
        .method(method(
            "register",
            "Register",
            "RegisterRequest",
            "Empty",
            false,
        ))
        .build();
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(method(
            "get_device_plugin_options",
            "GetDevicePluginOptions",
            "Empty",
            "DevicePluginOptions",
            false,
        ))
        .method(method(
            "list_and_watch",
            "ListAndWatch",
            "Empty",
            "ListAndWatchResponse",
            true,
        ))
        .method(method(
            "get_preferred_allocation",
            "GetPreferredAllocation",
            "Empty",
            "Empty",
            false,
        ))
        .method(method(
            "allocate",
            "Allocate",
            "AllocateRequest",
            "AllocateResponse",
            false,
        ))
        .method(method(
            "pre_start_container",
            "PreStartContainer",
            "Empty",
            "Empty",
            false,
        ))
        .build();
    Builder::new().compile(&[registration, plugin]);
}
