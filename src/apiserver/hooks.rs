//! What happens around the storage of a few kinds, as upstream's stores have `BeginCreate` and `AfterDelete`:
//! a service's addresses and ports are taken before it is stored and given back when it goes.

use std::sync::Arc;

use serde_json::Value;
use windlass_api::ApiError;

use crate::allocate::{Allocation, Allocators};
use crate::rest::Call;
use crate::storage::Stored;

/// What was taken for a write that is not done yet: to be committed or reverted. Lost (the process is killed), it is
/// a leak that the allocators' repair mends.
#[must_use]
#[derive(Debug, Default)]
pub struct Hold(Option<Allocation>);

/// The kinds with hooks.
pub struct Hooks {
    pub services: Arc<Allocators>,
}

impl Hooks {
    /// Before a new object is prepared and validated; it has its name.
    pub async fn before_create(&self, call: &Call, object: &mut Value, dry_run: bool) -> Result<Hold, ApiError> {
        if !is_service(call) {
            return Ok(Hold(None));
        }
        self.services.create(object, dry_run).await.map(|a| Hold(Some(a)))
    }

    /// Before a changed object is prepared and validated.
    pub async fn before_update(&self, call: &Call, new: &mut Value, old: &Value, dry_run: bool) -> Result<Hold, ApiError> {
        if !is_service(call) || call.subresource().is_some() {
            return Ok(Hold(None));
        }
        self.services.update(new, old, dry_run).await.map(|a| Hold(Some(a)))
    }

    /// The write was done.
    pub async fn commit(&self, hold: Hold) {
        if let Some(allocation) = hold.0 {
            self.services.commit(allocation).await;
        }
    }

    /// The write was refused, or has to start again.
    pub async fn revert(&self, hold: Hold) {
        if let Some(allocation) = hold.0 {
            self.services.revert(allocation).await;
        }
    }

    /// The object is gone; this was its last state.
    pub async fn after_delete(&self, call: &Call, last: &Stored) {
        if is_service(call) {
            self.services.delete(&last.value()).await;
        }
    }
}

fn is_service(call: &Call) -> bool {
    call.resource.group.is_empty() && call.resource.plural == "services"
}
