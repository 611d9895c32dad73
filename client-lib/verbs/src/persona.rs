//! The persona that each device shows to this program: the one in `SIW_PERSONA` (`siwrun --persona`), else
//! the device's own in the configuration of siwd.

use siw::{DeviceInfo, Persona};
use siw_shm::persona::PERSONA_VARIABLE;
use std::sync::OnceLock;

/// The persona that this program wants for all devices. It stays the same for the life of the process.
pub fn wanted_persona() -> Option<Persona> {
    static WANTED: OnceLock<Option<Persona>> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let text = std::env::var_os(PERSONA_VARIABLE).filter(|text| !text.is_empty())?;
        match text.to_string_lossy().parse() {
            Ok(persona) => Some(persona),
            Err(error) => {
                siw::print_line(format_args!(
                    "siw-verbs: {PERSONA_VARIABLE}: {error}; it is ignored"
                ));
                None
            }
        }
    })
}

/// The persona of a device.
pub fn persona_of(info: &DeviceInfo) -> Persona {
    wanted_persona().unwrap_or(info.persona)
}
