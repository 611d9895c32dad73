//! The plugin's server, its registration with the kubelet, and its return after a restart of the kubelet,
//! which removes the sockets of all plugins.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::transport::{Endpoint, Server, Uri};
use tonic::{Request, Response, Status};

use crate::Node;
use crate::api::services::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::api::services::registration_client::RegistrationClient;
use crate::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, ListAndWatchResponse, RegisterRequest, VERSION,
};

/// Name of the kubelet's socket in its folder.
const KUBELET: &str = "kubelet.sock";
/// Name of the plugin's socket beside it.
const OWN: &str = "siwd.sock";

/// Settings of the plugin.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The kubelet's folder for plugins.
    pub folder: PathBuf,
    /// Name of the resource.
    pub resource: String,
    /// The devices.
    pub node: Node,
    /// Time between looks at siwd and at the kubelet.
    pub interval: Duration,
}

struct Plugin {
    node: Node,
    devices: watch::Receiver<Vec<Device>>,
}

type DeviceStream = std::pin::Pin<
    Box<dyn tokio_stream::Stream<Item = Result<ListAndWatchResponse, Status>> + Send>,
>;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = DeviceStream;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<DeviceStream>, Status> {
        let lists = WatchStream::new(self.devices.clone());
        let responses = lists.map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(Box::pin(responses)))
    }

    async fn get_preferred_allocation(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("all units of a device are alike"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let responses = containers.iter().map(|container| {
            let found = self.node.cdi_devices(&container.devices_ids);
            found
                .map(|cdi_devices| ContainerAllocateResponse { cdi_devices })
                .map_err(|error| Status::invalid_argument(format!("{error:#}")))
        });
        let container_responses = responses.collect::<Result<_, _>>()?;
        Ok(Response::new(AllocateResponse {
            container_responses,
        }))
    }

    async fn pre_start_container(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }
}

/// Identity of a file; `None` if there is none.
fn identity(path: &Path) -> Option<(u64, u64, i64)> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime_nsec()))
}

async fn register(settings: &Settings) -> anyhow::Result<()> {
    let path = settings.folder.join(KUBELET);
    let shown = path.display().to_string();
    // The address is not used.
    let channel = Endpoint::from_static("http://kubelet")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        }))
        .await
        .with_context(|| format!("the kubelet does not answer at {shown}"))?;
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: OWN.to_owned(),
        resource_name: settings.resource.clone(),
        options: Some(DevicePluginOptions::default()),
    };
    RegistrationClient::new(channel)
        .register(request)
        .await
        .with_context(|| format!("the kubelet at {shown} refuses {}", settings.resource))?;
    Ok(())
}

/// Serves until the kubelet has restarted.
async fn serve_once(
    settings: &Settings,
    devices: &watch::Receiver<Vec<Device>>,
) -> anyhow::Result<()> {
    let own = settings.folder.join(OWN);
    // That of a plugin that was killed.
    let _ = std::fs::remove_file(&own);
    let listener = UnixListener::bind(&own)
        .with_context(|| format!("cannot listen at {}: is the folder mounted?", own.display()))?;
    let plugin = Plugin {
        node: settings.node.clone(),
        devices: devices.clone(),
    };
    let server = Server::builder()
        .add_service(DevicePluginServer::new(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let place = identity(&own);
    let kubelet = identity(&settings.folder.join(KUBELET));
    let follow = async {
        register(settings).await?;
        println!("siw-device-plugin: {} is registered", settings.resource);
        let mut ticks = tokio::time::interval(settings.interval);
        loop {
            ticks.tick().await;
            let is_same =
                identity(&own) == place && identity(&settings.folder.join(KUBELET)) == kubelet;
            if !is_same {
                println!("siw-device-plugin: the kubelet has restarted");
                return Ok(());
            }
        }
    };
    tokio::select! {
        ended = server => ended.context("the server of the plugin ended"),
        followed = follow => followed,
    }
}

/// Runs the plugin; does not end by itself. A kubelet that does not answer is tried again.
pub async fn run(settings: Settings) {
    let (publish, devices) = watch::channel(settings.node.devices());
    let node = settings.node.clone();
    let interval = settings.interval;
    let observe = async move {
        let mut ticks = tokio::time::interval(interval);
        loop {
            ticks.tick().await;
            let now = node.devices();
            publish.send_if_modified(|known| {
                let has_changed = *known != now;
                *known = now;
                has_changed
            });
        }
    };
    let serve = async {
        loop {
            if let Err(error) = serve_once(&settings, &devices).await {
                eprintln!("siw-device-plugin: {error:#}; trying again");
                tokio::time::sleep(settings.interval).await;
            }
        }
    };
    tokio::join!(observe, serve);
}
