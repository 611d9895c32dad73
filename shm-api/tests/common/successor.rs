//! A successor within the process: state is saved, forgotten, and restored from the bytes.

use serde::Serialize;
use serde::de::DeserializeOwned;
use siw_shm::saved::{KeptResources, Restoring, Saving};

/// The bytes of a state, and the resources that it refers to.
pub fn save<T: Serialize>(state: &T) -> (Vec<u8>, KeptResources) {
    let mut saving = Saving::default();
    let bytes = saving.run(|| postcard::to_stdvec(state)).unwrap();
    let kept = postcard::to_stdvec(&saving.into_kept()).unwrap();
    (bytes, postcard::from_bytes(&kept).unwrap())
}

/// The state as a successor gets it.
pub fn succeed<T: Serialize + DeserializeOwned>(state: T) -> T {
    let (bytes, kept) = save(&state);
    std::mem::forget(state);
    // SAFETY: the owners of the resources were forgotten.
    let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
    restoring.run(|| postcard::from_bytes(&bytes)).unwrap()
}
