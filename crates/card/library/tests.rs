//! The functions as a C program would call them. The card is one of four gigabytes: the process has no description.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::card::Card;
use super::runtime::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use super::{
    blas, dispatch, dnn, dnn_recurrent, driver, launch, memory, nccl, pool, properties, runtime,
    stream, virtual_memory,
};

const MIB: usize = 1 << 20;

/// There is one card a process, and tests run at the same time: one that counts its memory has it alone.
fn alone() -> MutexGuard<'static, ()> {
    static CARD: Mutex<()> = Mutex::new(());
    CARD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn allocate(bytes: usize) -> Result<*mut c_void, c_int> {
    let mut address = null_mut();
    // SAFETY: an output of the right type.
    match unsafe { runtime::cudaMalloc(&mut address, bytes) } {
        SUCCESS => Ok(address),
        error => Err(error),
    }
}

fn free(address: *mut c_void) -> c_int {
    // SAFETY: any address may be tried: a wrong one is refused.
    unsafe { runtime::cudaFree(address) }
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    assert_eq!(
        // SAFETY: outputs of the right type.
        unsafe { runtime::cudaMemGetInfo(&mut free, &mut total) },
        SUCCESS
    );
    assert_eq!(total, 4 << 30);
    free
}

#[test]
fn memory_is_counted_until_the_card_is_full() {
    let _card = alone();
    let before = free_bytes();
    let first = allocate(3 * MIB).unwrap();
    assert_eq!(before - free_bytes(), 4 * MIB, "granules of two megabytes");
    let second = allocate(before - 4 * MIB).unwrap();
    assert_eq!(allocate(2 * MIB), Err(OUT_OF_MEMORY));
    // SAFETY: no arguments.
    assert_eq!(unsafe { runtime::cudaGetLastError() }, OUT_OF_MEMORY);
    assert_eq!(
        // SAFETY: no arguments.
        unsafe { runtime::cudaGetLastError() },
        SUCCESS,
        "reading an error clears it"
    );
    assert_eq!((free(first), free(second)), (SUCCESS, SUCCESS));
    assert_eq!(free_bytes(), before);
}

#[test]
fn small_requests_share_a_granule() {
    let _card = alone();
    let before = free_bytes();
    let addresses: Vec<_> = (0..8).map(|_| allocate(1000).unwrap()).collect();
    assert_eq!(before - free_bytes(), 2 * MIB);
    for address in addresses {
        assert_eq!(free(address), SUCCESS);
    }
    assert_eq!(free_bytes(), before);
}

#[test]
fn what_was_not_handed_out_is_not_taken_back() {
    let _card = alone();
    let address = allocate(MIB).unwrap();
    assert_eq!(free(address.wrapping_byte_add(512)), INVALID_VALUE);
    assert_eq!(free(address), SUCCESS);
    assert_eq!(free(address), INVALID_VALUE, "a second time");
    assert_eq!(free(8 as *mut c_void), INVALID_VALUE, "of the host");
    assert_eq!(free(null_mut()), SUCCESS, "nothing");
}

#[test]
fn an_impossible_size_is_out_of_memory() {
    let _card = alone();
    assert_eq!(allocate(usize::MAX), Err(OUT_OF_MEMORY));
    assert_eq!(allocate(1 << 50), Err(OUT_OF_MEMORY));
}

#[test]
fn small_copies_are_real_and_large_ones_are_not() {
    let _card = alone();
    let address = allocate(16 * MIB).unwrap();
    let sent = vec![7_u8; 4096];
    let mut read = vec![0_u8; 4096];
    // SAFETY: both ranges have that many bytes.
    unsafe {
        runtime::cudaMemcpy(address, sent.as_ptr().cast(), sent.len(), 1);
        runtime::cudaMemset(address.byte_add(4), 9, 4);
        runtime::cudaMemcpy(read.as_mut_ptr().cast(), address, read.len(), 2);
    }
    assert_eq!(&read[..10], [7, 7, 7, 7, 9, 9, 9, 9, 7, 7]);
    let large = vec![1_u8; memory::REAL_BYTES as usize + 1];
    // SAFETY: both ranges have that many bytes.
    unsafe {
        runtime::cudaMemcpy(address, large.as_ptr().cast(), large.len(), 1);
        runtime::cudaMemcpy(read.as_mut_ptr().cast(), address, 4, 2);
    }
    assert_eq!(read[0], 7, "a large copy moves nothing");
    free(address);
}

#[test]
fn pointers_are_told_apart() {
    let _card = alone();
    let device = allocate(MIB).unwrap();
    let mut pinned = null_mut();
    assert_eq!(
        // SAFETY: outputs of the right type.
        unsafe { runtime::cudaHostAlloc(&mut pinned, 100, 0) },
        SUCCESS
    );
    let own = 0_u64;
    let kind = |pointer: *const c_void| {
        let mut attributes = runtime::PointerAttributes {
            kind: -1,
            device: -1,
            device_pointer: null_mut(),
            host_pointer: null_mut(),
        };
        // SAFETY: an output of the right type; the pointer is not read through.
        unsafe { runtime::cudaPointerGetAttributes(&mut attributes, pointer) };
        attributes.kind
    };
    assert_eq!(kind(device), 2);
    assert_eq!(kind(pinned), 1);
    assert_eq!(kind((&raw const own).cast()), 0);
    // SAFETY: pinned memory of this size, and its address once.
    unsafe {
        pinned.cast::<u8>().write_bytes(1, 100);
        assert_eq!(runtime::cudaFreeHost(pinned), SUCCESS);
        assert_eq!(runtime::cudaFreeHost(pinned), INVALID_VALUE);
    }
    free(device);
}

#[test]
fn properties_have_the_layout_of_each_version() {
    let number =
        |bytes: &[u8], at: usize| i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    let size = |bytes: &[u8], at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    // Where NVIDIA's headers have them: memory, major, multiprocessors, surface alignment, threads and shared memory of a
    // multiprocessor, shared memory on request, blocks of a multiprocessor, the whole.
    for (version, places, whole) in [
        (12, [288, 360, 388, 568, 624, 640, 696, 712], 1032),
        (13, [288, 360, 384, 552, 604, 624, 672, 688], 1008),
    ] {
        let bytes = properties::bytes(version);
        assert_eq!(bytes.len(), whole, "CUDA {version}");
        assert_eq!(CStr::from_bytes_until_nul(&bytes).unwrap(), c"cinch card");
        assert_eq!(size(&bytes, places[0]), 4 << 30);
        assert_eq!(number(&bytes, places[1]), 8);
        assert_eq!(number(&bytes, places[2]), 108);
        assert_eq!(size(&bytes, places[3]), 512);
        assert_eq!(number(&bytes, places[4]), 2048);
        assert_eq!(size(&bytes, places[5]), 164 << 10);
        assert_eq!(size(&bytes, places[6]), 163 << 10);
        assert_eq!(number(&bytes, places[7]), 32);
    }
}

#[test]
fn a_description_is_read_and_nonsense_in_it_is_not() {
    let card =
        Card::parse("name=NVIDIA H200;memory=150019768320;major=9;minor=x;devices=0;what=1;;=");
    assert_eq!(card.name, "NVIDIA H200");
    assert_eq!(
        (card.memory, card.major, card.minor),
        (150_019_768_320, 9, 0)
    );
    assert_eq!(card.devices, 1);
    assert_eq!(card.limits().shared_per_block_opt_in, 227 << 10);
}

#[test]
fn devices_that_are_not_there_are_refused() {
    let mut number = -1;
    // SAFETY: outputs of the right type.
    unsafe {
        assert_eq!(runtime::cudaGetDeviceCount(&mut number), SUCCESS);
        assert_eq!(number, 1);
        assert_ne!(runtime::cudaSetDevice(1), SUCCESS);
        assert_ne!(runtime::cudaSetDevice(-1), SUCCESS);
        assert_ne!(driver::cuDeviceGet(&mut number, 7), SUCCESS);
        assert_ne!(
            runtime::cudaDeviceGetAttribute(&mut number, 100_000, 0),
            SUCCESS
        );
    }
}

#[test]
fn private_tables_are_refused() {
    let mut table: *const c_void = 8 as *const c_void;
    assert_ne!(
        // SAFETY: an output of the right type.
        unsafe { driver::cuGetExportTable(&mut table, null()) },
        SUCCESS
    );
    assert!(table.is_null());
}

#[test]
fn expandable_segments_count_what_is_mapped() {
    let _card = alone();
    let before = free_bytes();
    let properties = [1_i32, 0, 1, 0];
    let (mut address, mut handle) = (0, 0);
    let bytes = 20 * MIB;
    // SAFETY: outputs of the right types, and a struct of four numbers as documented.
    unsafe {
        assert_eq!(
            virtual_memory::cuMemAddressReserve(&mut address, 1 << 40, 0, 0, 0),
            SUCCESS
        );
        assert_eq!(free_bytes(), before, "addresses are free");
        assert_eq!(
            virtual_memory::cuMemCreate(&mut handle, bytes, properties.as_ptr().cast(), 0),
            SUCCESS
        );
        assert_eq!(
            virtual_memory::cuMemMap(address, bytes, 0, handle, 0),
            SUCCESS
        );
        assert_eq!(virtual_memory::cuMemRelease(handle), SUCCESS);
        assert_eq!(before - free_bytes(), bytes, "a mapping holds its memory");
        assert_eq!(virtual_memory::cuMemUnmap(address, bytes), SUCCESS);
        assert_eq!(free_bytes(), before);
        assert_eq!(virtual_memory::cuMemUnmap(address, bytes), INVALID_VALUE);
        assert_eq!(virtual_memory::cuMemRelease(handle), INVALID_VALUE);
        let too_much = 1 << 40;
        assert_eq!(
            virtual_memory::cuMemCreate(&mut handle, too_much, properties.as_ptr().cast(), 0),
            OUT_OF_MEMORY
        );
        assert_eq!(
            virtual_memory::cuMemExportToShareableHandle(),
            NOT_SUPPORTED
        );
    }
}

#[test]
fn memory_at_an_address_can_be_held_once_more() {
    let _card = alone();
    let before = free_bytes();
    let properties = [1_i32, 0, 1, 0];
    let (mut address, mut handle, mut again) = (0, 0, 0);
    let bytes = 20 * MIB;
    // SAFETY: outputs of the right types, and structs as documented.
    unsafe {
        virtual_memory::cuMemAddressReserve(&mut address, 1 << 40, 0, 0, 0);
        virtual_memory::cuMemCreate(&mut handle, bytes, properties.as_ptr().cast(), 0);
        virtual_memory::cuMemMap(address, bytes, 0, handle, 0);
        assert_eq!(virtual_memory::cuMemRelease(handle), SUCCESS);
        let inside = (address + bytes as u64 - 1) as *const c_void;
        assert_eq!(
            virtual_memory::cuMemRetainAllocationHandle(&mut again, inside),
            SUCCESS
        );
        assert_eq!(again, handle);
        let mut found = [u32::MAX; 8];
        assert_eq!(
            virtual_memory::cuMemGetAllocationPropertiesFromHandle(
                found.as_mut_ptr().cast(),
                again
            ),
            SUCCESS
        );
        assert_eq!(found, [1, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(virtual_memory::cuMemUnmap(address, bytes), SUCCESS);
        assert_eq!(before - free_bytes(), bytes, "the handle holds it");
        assert_eq!(virtual_memory::cuMemRelease(again), SUCCESS);
        assert_eq!(free_bytes(), before);
        assert_eq!(
            virtual_memory::cuMemRetainAllocationHandle(&mut again, inside),
            INVALID_VALUE
        );
        assert_eq!(
            virtual_memory::cuMemGetAllocationPropertiesFromHandle(
                found.as_mut_ptr().cast(),
                again
            ),
            INVALID_VALUE
        );
    }
}

#[test]
fn pools_keep_what_is_freed_up_to_their_threshold() {
    let _card = alone();
    let before = free_bytes();
    let (mut pool, mut first, mut second) = (null_mut(), null_mut(), null_mut());
    let bytes = 20 * MIB;
    // SAFETY: outputs of the right types.
    unsafe {
        pool::cudaDeviceGetDefaultMemPool(&mut pool, 0);
        let number = |attribute| {
            let mut value = 0_u64;
            let to = (&raw mut value).cast();
            assert_eq!(pool::cudaMemPoolGetAttribute(pool, attribute, to), SUCCESS);
            value as usize
        };
        let (threshold, reserved, most_reserved, used) = (4, 5, 6, 7);
        assert_eq!(
            pool::cudaMallocAsync(&mut first, bytes, null_mut()),
            SUCCESS
        );
        assert_eq!(before - free_bytes(), bytes);
        assert_eq!(runtime::cudaFreeAsync(first, null_mut()), SUCCESS);
        assert_eq!(free_bytes(), before, "the threshold of a new pool is 0");
        let all = u64::MAX;
        let value = (&raw const all).cast();
        assert_eq!(
            pool::cudaMemPoolSetAttribute(pool, threshold, value),
            SUCCESS
        );
        pool::cudaMallocAsync(&mut first, bytes, null_mut());
        assert_eq!(runtime::cudaFree(first), SUCCESS, "a plain free serves too");
        assert_eq!([number(used), number(reserved)], [0, bytes]);
        pool::cudaMallocAsync(&mut second, bytes / 2, null_mut());
        assert_eq!(
            before - free_bytes(),
            bytes,
            "it is taken from what is kept"
        );
        assert_eq!(pool::cudaMemPoolTrimTo(pool, 0), SUCCESS);
        assert_eq!(before - free_bytes(), bytes / 2);
        assert_eq!(number(most_reserved), bytes);
        runtime::cudaFreeAsync(second, null_mut());
        pool::cudaMemPoolTrimTo(pool, 0);
        assert_eq!(free_bytes(), before);
        let none = 0_u64;
        let value = (&raw const none).cast();
        pool::cudaMemPoolSetAttribute(pool, most_reserved, value);
        assert_eq!(number(most_reserved), 0);
        pool::cudaMemPoolSetAttribute(pool, threshold, value);
        assert_eq!(
            pool::cudaMallocAsync(&mut first, 1 << 50, null_mut()),
            OUT_OF_MEMORY
        );
        assert_eq!(runtime::cudaFreeAsync(second, null_mut()), INVALID_VALUE);
        let other = 99 as *mut c_void;
        assert_eq!(
            pool::cudaMallocFromPoolAsync(&mut first, bytes, other, null_mut()),
            INVALID_VALUE
        );
    }
}

#[test]
fn events_have_happened_and_captures_begin_and_end() {
    let (mut start, mut end) = (null_mut(), null_mut());
    let mut time = -1.0;
    let mut status = -1;
    let mut graph = null_mut();
    // SAFETY: outputs of the right types; events are destroyed once.
    unsafe {
        stream::cudaEventCreate(&mut start);
        stream::cudaEventCreateWithFlags(&mut end, 2);
        assert_eq!(stream::cudaEventRecord(start, null_mut()), SUCCESS);
        assert_eq!(stream::cudaEventRecord(end, null_mut()), SUCCESS);
        assert_eq!(stream::cudaEventElapsedTime(&mut time, start, end), SUCCESS);
        assert!(time > 0.0);
        assert_ne!(stream::cudaEventRecord(null_mut(), null_mut()), SUCCESS);
        stream::cudaEventDestroy(start);
        stream::cudaEventDestroy(end);
        let captured = 0x70 as *mut c_void;
        stream::cudaStreamBeginCapture(captured, 0);
        stream::cudaStreamIsCapturing(captured, &mut status);
        assert_eq!(status, 1);
        stream::cudaStreamIsCapturing(null_mut(), &mut status);
        assert_eq!(status, 0, "another stream");
        stream::cudaStreamEndCapture(captured, &mut graph);
        assert!(!graph.is_null());
        stream::cudaStreamIsCapturing(captured, &mut status);
        assert_eq!(status, 0);
    }
}

#[test]
fn callbacks_run() {
    extern "C" fn add(number: *mut c_void) {
        // SAFETY: the number of the test below.
        unsafe { *number.cast::<i32>() += 1 };
    }
    let mut number = 0_i32;
    // SAFETY: the callback's data is that number, and it runs before the call returns.
    unsafe {
        stream::cudaLaunchHostFunc(null_mut(), Some(add), (&raw mut number).cast());
        stream::cudaLaunchHostFunc(null_mut(), None, null_mut());
    }
    assert_eq!(number, 1);
}

#[test]
fn occupancy_follows_threads_and_shared_memory() {
    assert_eq!(launch::occupancy(1024, 0), 2);
    assert_eq!(launch::occupancy(32, 0), 32);
    assert_eq!(launch::occupancy(128, 80 << 10), 2);
    assert_eq!(launch::occupancy(0, usize::MAX), 1);
}

#[test]
fn a_card_runs_the_newest_code_of_its_generation_or_what_is_compiled_for_it() {
    let best = |chip, codes: &[(i32, bool)]| {
        let services = codes
            .iter()
            .map(|&(code, is_source)| launch::service(chip, code, is_source));
        services
            .max()
            .flatten()
            .map(|(_, architecture)| architecture)
    };
    let wheel = [75, 80, 86, 90, 100, 120].map(|code| (code, false));
    assert_eq!(best(89, &wheel), Some(86));
    assert_eq!(best(80, &wheel), Some(80));
    assert_eq!(best(90, &wheel), Some(90));
    assert_eq!(best(103, &wheel), Some(100));
    assert_eq!(best(70, &wheel), None);
    let old = [(70, false), (80, false), (80, true), (75, true)];
    assert_eq!(best(86, &old), Some(80));
    assert_eq!(best(90, &old), Some(80));
}

#[test]
fn a_product_has_one_algorithm() {
    let _card = alone();
    let mut handle = null_mut();
    let mut count = -1;
    // SAFETY: outputs of the right types; no room for results is asked for.
    unsafe {
        assert_eq!(blas::cublasCreate_v2(&mut handle), SUCCESS);
        assert!(!handle.is_null());
        let none = null_mut();
        blas::cublasLtMatmulAlgoGetHeuristic(
            handle,
            none,
            none,
            none,
            none,
            none,
            none,
            0,
            null_mut(),
            &mut count,
        );
    }
    assert_eq!(count, 0);
}

#[test]
fn ranks_are_alike() {
    let _card = alone();
    let mut id = std::mem::MaybeUninit::uninit();
    let mut handle = null_mut();
    let memory = allocate(64).unwrap();
    let (mut count, mut rank) = (0, 0);
    let mut read = [0_u8; 16];
    // SAFETY: outputs of the right types, and ranges of the card with room for four ranks' bytes.
    unsafe {
        nccl::ncclGetUniqueId(id.as_mut_ptr());
        assert_eq!(
            nccl::ncclCommInitRank(&mut handle, 4, id.assume_init(), 2),
            SUCCESS
        );
        nccl::ncclCommCount(handle, &mut count);
        nccl::ncclCommUserRank(handle, &mut rank);
        assert_eq!((count, rank), (4, 2));
        runtime::cudaMemcpy(memory, [1_u8, 2, 3, 4].as_ptr().cast(), 4, 1);
        nccl::ncclAllGather(memory, memory.byte_add(16), 4, 0, handle, null_mut());
        runtime::cudaMemcpy(read.as_mut_ptr().cast(), memory.byte_add(16), 16, 2);
        assert_eq!(read, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]);
        nccl::ncclCommDestroy(handle);
        assert_ne!(nccl::ncclCommCount(handle, &mut count), SUCCESS);
    }
    free(memory);
}

/// Sizes that cuDNN 9.19 gave on an H200: cell, element, layers, direction, batch, length, input, hidden; reserve, weights.
#[test]
fn recurrent_nets_reserve_what_the_h200_says() {
    for (cell, element, layers, direction, [batch, length, input, hidden], reserve, weights) in [
        (2, 0, 1, 0, [64, 128, 512, 512], 83_886_336, 8_404_992),
        (2, 0, 2, 0, [64, 128, 512, 512], 184_549_632, 16_809_984),
        (2, 0, 4, 0, [64, 128, 512, 512], 385_876_224, 33_619_968),
        (2, 0, 2, 1, [64, 128, 512, 512], 369_099_008, 42_008_576),
        (2, 2, 2, 0, [64, 128, 512, 512], 92_274_944, 8_404_992),
        (3, 0, 1, 0, [16, 64, 256, 256], 6_291_712, 1_579_008),
    ] {
        let (net, sequence) = (0x10 as *mut c_void, 0x20 as *mut c_void);
        let none = null_mut();
        let (mut workspace, mut kept, mut bytes) = (0, 0, 0);
        // SAFETY: descriptors are names here; outputs have the right types.
        unsafe {
            dnn_recurrent::cudnnSetRNNDescriptor_v8(
                net, 0, cell, 2, direction, 0, element, 0, 0, input, hidden, hidden, layers, none,
                0,
            );
            dnn_recurrent::cudnnSetRNNDataDescriptor(
                sequence,
                element,
                1,
                length,
                batch,
                input,
                null(),
                none,
            );
            dnn_recurrent::cudnnGetRNNTempSpaceSizes(
                none,
                net,
                1,
                sequence,
                &mut workspace,
                &mut kept,
            );
            dnn_recurrent::cudnnGetRNNWeightSpaceSize(none, net, &mut bytes);
        }
        assert_eq!(
            (kept, bytes),
            (reserve, weights),
            "{cell} {layers} {direction}"
        );
        assert!(workspace > bytes);
    }
}

#[test]
fn a_mode_that_follows_values_does_not_count() {
    assert!(!dispatch::others_are_on(false, 0, 0));
    assert!(!dispatch::others_are_on(false, 1, 1), "the key is excluded");
    assert!(dispatch::others_are_on(true, 1, 0), "the script's own");
    assert!(!dispatch::others_are_on(true, 1, 1));
    assert!(dispatch::others_are_on(true, 2, 1), "one of each");
    // SAFETY: numbers.
    unsafe {
        assert_eq!(dispatch::cinch_card_following(1), 1);
        assert_eq!(dispatch::cinch_card_following(1), 2);
        assert_eq!(dispatch::cinch_card_following(-2), 0);
        assert_eq!(dispatch::cinch_card_following(-1), 0);
        assert!(
            !dispatch::_ZN3c104impl21dispatch_mode_enabledEv(),
            "no PyTorch here"
        );
    }
}

#[test]
fn many_threads_share_the_card() {
    let _card = alone();
    let before = free_bytes();
    std::thread::scope(|scope| {
        for thread in 0..16_usize {
            scope.spawn(move || {
                for round in 0..50 {
                    let sizes = [4096, MIB, (1 + (thread + round) % 7) * MIB];
                    let addresses = sizes.map(|size| allocate(size).unwrap() as usize);
                    for (index, &address) in addresses.iter().enumerate() {
                        let end = address + sizes[index];
                        let rest = addresses.iter().skip(index + 1).zip(&sizes[index + 1..]);
                        for (&other, &size) in rest {
                            assert!(end <= other || other + size <= address, "two at one place");
                        }
                    }
                    for address in addresses {
                        assert_eq!(free(address as *mut c_void), SUCCESS);
                    }
                }
            });
        }
    });
    assert_eq!(free_bytes(), before);
}

#[test]
fn a_card_that_was_filled_and_emptied_is_as_before() {
    let _card = alone();
    let before = free_bytes();
    let mut addresses = Vec::new();
    while let Ok(address) = allocate(64 * MIB) {
        addresses.push(address);
    }
    assert_eq!(addresses.len(), before / (64 * MIB));
    assert!(free_bytes() < 64 * MIB);
    for address in addresses {
        assert_eq!(free(address), SUCCESS);
    }
    assert_eq!(free_bytes(), before);
}

#[test]
fn batch_norms_take_what_the_h200_says() {
    use dnn::Pass::{Backward, Forward};
    // Single precision or not, places, channels; forward and backward in bytes.
    for (is_single, places, channels, forward, backward) in [
        (true, 8 * 64 * 64, 2048, 8_455_344, 5_604_512),
        (true, 400 * 7 * 7, 1024, 2_535_728, 1_680_480),
        (true, 32 * 86 * 86, 1024, 30_531_824, 20_202_592),
        (false, 400 * 64 * 64, 128, 10_568_760, 17_477_672),
        (false, 300 * 22 * 22, 1280, 9_371_712, 15_494_256),
        (false, 112 * 112, 672, 449_520, 738_892),
    ] {
        for (pass, measured) in [(Forward, forward), (Backward, backward)] {
            let bytes = dnn::batch_norm_bytes(pass, is_single, places, channels) as f64;
            assert!(
                (bytes / f64::from(measured) - 1.0).abs() < 0.02,
                "{bytes} for {measured}"
            );
        }
    }
    assert_eq!(dnn::batch_norm_bytes(Forward, true, 1 << 20, 3), 0);
}
