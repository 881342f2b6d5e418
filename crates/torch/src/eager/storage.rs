//! Storages: bytes on the device, shared by a tensor and its views.
//!
//! They lie side by side in one vector and are named by their number. A long loop keeps half a million of them: a dozen
//! bytes each, and a place that is left is taken again, so that none is ever asked of the system.

use super::context::{AllocationCategory, State};
use super::memory::Block;

/// The number of a storage.
#[derive(Clone, Copy)]
pub(super) struct StorageId(u32);

struct Storage {
    /// Tensors over these bytes.
    references: u32,
    /// Where they are; none of an empty tensor.
    block: Option<Block>,
    /// The event of the allocation.
    event: u32,
    category: AllocationCategory,
}

#[derive(Default)]
pub(super) struct Storages {
    slots: Vec<Storage>,
    vacant: Vec<u32>,
}

impl Storages {
    fn add(&mut self, storage: Storage) -> StorageId {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = storage;
            return StorageId(slot);
        }
        self.slots.push(storage);
        StorageId(self.slots.len() as u32 - 1)
    }
}

impl State {
    /// Storage of one owner.
    pub(super) fn new_storage(&self, op: &'static str, bytes: u64) -> StorageId {
        let (block, event) = match self.allocate(op, bytes) {
            Some((block, event)) => (Some(block), event),
            None => (None, u32::MAX),
        };
        self.storages.borrow_mut().add(Storage {
            references: 1,
            block,
            event,
            category: self.category(),
        })
    }

    /// Storage without bytes, as on the device `meta`.
    pub(super) fn new_empty_storage(&self) -> StorageId {
        self.storages.borrow_mut().add(Storage {
            references: 1,
            block: None,
            event: u32::MAX,
            category: self.category(),
        })
    }

    /// Other bytes for a storage: the new ones are there before the old ones go.
    pub(super) fn replace_bytes(&self, id: StorageId, op: &'static str, bytes: u64) {
        let (block, event) = match self.allocate(op, bytes) {
            Some((block, event)) => (Some(block), event),
            None => (None, u32::MAX),
        };
        let mut storages = self.storages.borrow_mut();
        let storage = &mut storages.slots[id.0 as usize];
        let old = std::mem::replace(&mut storage.block, block);
        let old_event = std::mem::replace(&mut storage.event, event);
        let category = storage.category;
        drop(storages);
        if let Some(old) = old {
            self.free(old, old_event, category);
        }
    }

    /// One owner more.
    pub(super) fn share_storage(&self, id: StorageId) -> StorageId {
        self.storages.borrow_mut().slots[id.0 as usize].references += 1;
        id
    }

    /// One owner less; the last one frees the bytes.
    pub(super) fn release_storage(&self, id: StorageId) {
        let mut storages = self.storages.borrow_mut();
        let storage = &mut storages.slots[id.0 as usize];
        storage.references -= 1;
        if storage.references > 0 {
            return;
        }
        let (block, event, category) = (storage.block, storage.event, storage.category);
        storages.vacant.push(id.0);
        drop(storages);
        if let Some(block) = block {
            self.free(block, event, category);
        }
    }

    pub(super) fn storage_owners(&self, id: StorageId) -> u32 {
        self.storages.borrow().slots[id.0 as usize].references
    }

    pub(super) fn storage_category(&self, id: StorageId) -> AllocationCategory {
        self.storages.borrow().slots[id.0 as usize].category
    }

    pub(super) fn set_storage_category(&self, id: StorageId, category: AllocationCategory) {
        self.storages.borrow_mut().slots[id.0 as usize].category = category;
    }
}
