//! JSON schema of the configuration, for editors.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::Config;

/// Returns the JSON schema (draft 2020-12) of the configuration file, with the meaning and the default
/// of each key. Relations between keys, and most ranges, are checked by `siwd --check` only.
pub fn configuration_schema() -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<Config>();
    schema.to_value()
}
