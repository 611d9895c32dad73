//! A configuration that a helper thread has read while siwd runs.

use nix::unistd::Gid;

use super::operators::Operators;
use crate::config::{Config, ConfigSource};
use crate::host;
use crate::prepared::look_up_operators;

/// A configuration that was read and checked, with the ids of its groups.
pub struct LoadedConfiguration {
    pub config: Config,
    pub operators: Operators,
    pub group: Option<Gid>,
}

impl LoadedConfiguration {
    /// Reads the configuration, and looks up the groups that it names.
    ///
    /// # Errors
    /// A mistake in the file, or a group that does not exist.
    pub fn read(source: &ConfigSource) -> Result<LoadedConfiguration, String> {
        let config = source.load().map_err(|error| error.to_string())?;
        let operators = look_up_operators(&config).map_err(|error| error.to_string())?;
        let group = config.control.group.as_ref();
        let group = group.map(|group| host::find_group(group.get_ref()));
        Ok(LoadedConfiguration {
            group: group.transpose()?,
            operators,
            config,
        })
    }
}
