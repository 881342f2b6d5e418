//! Small kernels, right ones and wrong ones: what they compute, and that each mistake is told.

use cinch_ptx::{Argument, Launch, Memory, PtxError, Region, TensorMap, parse, run};

const BASE: u64 = 0x7000_0000_0000;
const HEADER: &str = ".version 8.0\n.target sm_90a\n.address_size 64\n";

/// What a kernel `test` of one pointer makes of numbers, and what is wrong in it.
fn outcome(body: &str, block: u32, numbers: &[u32]) -> (Result<Vec<String>, PtxError>, Vec<u32>) {
    outcome_of(
        ".visible .entry test(.param .u64 p)",
        body,
        [1, 1, 1],
        block,
        numbers,
        &[],
    )
}

fn outcome_of(
    head: &str,
    body: &str,
    grid: [u32; 3],
    block: u32,
    numbers: &[u32],
    more: &[Argument],
) -> (Result<Vec<String>, PtxError>, Vec<u32>) {
    const REGISTERS: &str =
        ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %d<9>;";
    let text = format!("{HEADER}{head}\n{{\n{REGISTERS}\n{body}\nret;\n}}\n");
    let module = parse(&text).unwrap();
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|word| word.to_le_bytes()).collect();
    let end = BASE + bytes.len() as u64;
    let regions = vec![Region {
        bytes: BASE..end,
        is_written: true,
    }];
    let pointer = Argument::Bytes(BASE.to_le_bytes().to_vec());
    let arguments: Vec<Argument> = std::iter::once(pointer)
        .chain(more.iter().cloned())
        .collect();
    let launch = Launch {
        module: &module,
        kernel: "test",
        grid,
        block: [block, 1, 1],
        shared_bytes: 0,
        arguments: &arguments,
    };
    let told = run(&launch, &mut Memory::new(&mut bytes, BASE, regions));
    let words = bytes.as_chunks::<4>().0;
    (
        told,
        words.iter().map(|&word| u32::from_le_bytes(word)).collect(),
    )
}

/// The address of the thread's own number in `%d1`, its number in `%r1`.
const OWN: &str =
    "ld.param.u64 %d0, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d0, %d1;";

fn right(body: &str, block: u32, numbers: &[u32]) -> Vec<u32> {
    let (told, numbers) = outcome(body, block, numbers);
    assert_eq!(told.unwrap(), Vec::<String>::new());
    numbers
}

/// All that is told; of one mistake each of two threads may see the other's access first.
fn conflict(body: &str, block: u32) -> String {
    let (told, _) = outcome(body, block, &[0; 64]);
    told.unwrap().join("\n")
}

fn fault(body: &str, block: u32) -> String {
    let (told, _) = outcome(body, block, &[0; 64]);
    told.unwrap_err().to_string()
}

#[test]
fn lanes_that_part_meet_again() {
    // Odd threads count down from their number, and all add up what they have afterwards.
    let body = format!(
        "{OWN} mov.u32 %r2, 0; mov.u32 %r3, %r1; and.b32 %r4, %r1, 1; setp.eq.s32 %p1, %r4, 0;
         @%p1 bra $join;
         $loop: setp.eq.s32 %p2, %r3, 0; @%p2 bra $join; sub.s32 %r3, %r3, 1; add.s32 %r2, %r2, 1; bra $loop;
         $join: redux.sync.add.s32 %r5, %r2, -1; st.global.u32 [%d1], %r5;"
    );
    let odd: u32 = (1..32).step_by(2).sum();
    assert_eq!(right(&body, 32, &[0; 32]), [odd; 32]);
}

#[test]
fn numbers_go_from_lane_to_lane() {
    let body = format!(
        "{OWN} shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1; shfl.sync.up.b32 %r3|%p2, %r1, 3, 0, -1;
         shfl.sync.down.b32 %r4|%p3, %r1, 3, 31, -1; shfl.sync.idx.b32 %r5|%p4, %r1, 2, 6175, -1;
         mul.lo.s32 %r2, %r2, 1000000; mad.lo.s32 %r2, %r3, 10000, %r2; mad.lo.s32 %r2, %r4, 100, %r2;
         add.s32 %r2, %r2, %r5; st.global.u32 [%d1], %r2;"
    );
    let expected = |lane: u32| {
        let up = if lane >= 3 { lane - 3 } else { lane };
        let down = if lane < 29 { lane + 3 } else { lane };
        // Segments of eight lanes.
        let third = lane / 8 * 8 + 2;
        (lane ^ 5) * 1_000_000 + up * 10_000 + down * 100 + third
    };
    let numbers = right(&body, 32, &[0; 32]);
    assert_eq!(numbers, (0..32).map(expected).collect::<Vec<_>>());
}

const SHARED: &str =
    ".shared .align 16 .b8 s[1024]; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3;";
/// The place of the thread with the opposite number among 64.
const OTHER: &str = "xor.b32 %r4, %r1, 63; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4;";

#[test]
fn a_barrier_orders_what_threads_write_and_read() {
    let with = |between: &str| {
        format!(
            "{OWN} {SHARED} {OTHER} st.shared.u32 [%r3], %r1; {between}
             ld.shared.u32 %r5, [%r4]; st.global.u32 [%d1], %r5;"
        )
    };
    let numbers = right(&with("bar.sync 0;"), 64, &[0; 64]);
    assert_eq!(numbers, (0..64).rev().collect::<Vec<_>>());
    for between in ["", "bar.warp.sync -1;"] {
        let told = conflict(&with(between), 64);
        assert!(told.contains("`ld.shared.u32"), "{told}");
        assert!(
            told.contains("reads what was written, with nothing between"),
            "{told}"
        );
    }
}

#[test]
fn what_is_not_read_yet_must_not_be_overwritten() {
    let with = |between: &str| {
        format!(
            "{OWN} {SHARED} {OTHER} st.shared.u32 [%r3], %r1; bar.sync 0; ld.shared.u32 %r5, [%r4];
             {between} st.shared.u32 [%r3], %r5; st.global.u32 [%d1], %r5;"
        )
    };
    right(&with("bar.sync 0;"), 64, &[0; 64]);
    let told = conflict(&with(""), 64);
    assert!(told.contains("may not have been read yet"), "{told}");
}

#[test]
fn of_one_warp_lanes_are_ordered_by_their_own_barrier() {
    let with = |between: &str| {
        format!(
            "{OWN} {SHARED} xor.b32 %r4, %r1, 1; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4;
             st.shared.u32 [%r3], %r1; {between} ld.shared.u32 %r5, [%r4]; st.global.u32 [%d1], %r5;"
        )
    };
    right(&with("bar.warp.sync -1;"), 32, &[0; 32]);
    // That they are at the same instruction orders nothing.
    assert!(conflict(&with(""), 32).contains("with nothing between"));
}

#[test]
fn threads_that_add_need_no_order() {
    let body = format!(
        "{OWN} {SHARED} setp.ne.s32 %p1, %r1, 0; mov.u32 %r6, 0; @!%p1 st.shared.u32 [%r2], %r6; bar.sync 0;
         atom.shared.add.u32 %r5, [%r2], 2; bar.sync 0; ld.shared.u32 %r5, [%r2]; st.global.u32 [%d1], %r5;"
    );
    assert_eq!(right(&body, 64, &[0; 64]), [128; 64]);
}

/// A warp copies 64 numbers to shared memory with a barrier in it, and all read.
fn copied(wait: &str) -> String {
    format!(
        "{OWN} {SHARED} .shared .align 8 .b8 b[8]; mov.u32 %r7, b; setp.ne.s32 %p1, %r1, 0;
         @!%p1 mbarrier.init.shared::cta.b64 [%r7], 1; bar.sync 0;
         @%p1 bra $all;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 256;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 256, [%r7];
         $all: {wait} ld.shared.u32 %r5, [%r3]; add.s32 %r5, %r5, 1; st.global.u32 [%d1], %r5;"
    )
}

const WAIT: &str = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r7], 0; @!done bra again; }";

#[test]
fn a_copy_is_there_once_it_was_waited_for() {
    let numbers: Vec<u32> = (100..164).collect();
    assert_eq!(
        right(&copied(WAIT), 64, &numbers),
        (101..165).collect::<Vec<_>>()
    );
    let told = conflict(&copied(""), 64);
    assert!(told.contains("`cp.async.bulk"), "{told}");
    assert!(told.contains("reads what was written"), "{told}");
}

#[test]
fn the_copy_engine_sees_what_threads_wrote_after_a_fence() {
    let with = |fence: &str, wait: &str| {
        format!(
            "{OWN} {SHARED} st.shared.u32 [%r3], %r1; {fence} bar.sync 0; setp.ne.s32 %p1, %r1, 0; @%p1 bra $all;
             cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r2], 256;
             cp.async.bulk.commit_group; {wait} st.shared.u32 [%r2], 7; $all:"
        )
    };
    const FENCE: &str = "fence.proxy.async.shared::cta;";
    const WAIT: &str = "cp.async.bulk.wait_group.read 0;";
    assert_eq!(
        right(&with(FENCE, WAIT), 64, &[0; 64]),
        (0..64).collect::<Vec<_>>()
    );
    assert!(conflict(&with("", WAIT), 64).contains("for want of a fence"));
    assert!(conflict(&with(FENCE, ""), 64).contains("may not have been read yet"));
}

#[test]
fn copies_of_a_thread_are_its_own_until_all_have_met() {
    let with = |wait: &str| {
        format!(
            "{OWN} {SHARED} {OTHER} cp.async.ca.shared.global [%r3], [%d1], 4; cp.async.commit_group; {wait}
             ld.shared.u32 %r5, [%r4]; st.global.u32 [%d1], %r5;"
        )
    };
    let numbers: Vec<u32> = (0..64).collect();
    let reversed: Vec<u32> = (0..64).rev().collect();
    assert_eq!(
        right(&with("cp.async.wait_group 0; bar.sync 0;"), 64, &numbers),
        reversed
    );
    assert_eq!(
        right(&with("cp.async.wait_all; bar.sync 0;"), 64, &numbers),
        reversed
    );
    for wait in [
        "bar.sync 0;",
        "cp.async.wait_group 1; bar.sync 0;",
        "cp.async.wait_group 0;",
    ] {
        assert!(
            conflict(&with(wait), 64).contains("reads what was written"),
            "{wait}"
        );
    }
}

#[test]
fn memory_that_is_nobodys_is_not_touched() {
    let beyond = fault(&format!("{OWN} ld.global.u32 %r5, [%d1+4];"), 64);
    assert!(beyond.contains("reads 4 bytes"), "{beyond}");
    assert!(beyond.contains("line 7 `ld.global.u32"), "{beyond}");
    let odd = fault(
        &format!("{OWN} st.global.v2.u32 [%d0+4], {{%r1, %r1}};"),
        32,
    );
    assert!(odd.contains("not aligned"), "{odd}");
    let shared = fault(
        &format!("{OWN} {SHARED} st.shared.u32 [%r3+1024], %r1;"),
        32,
    );
    assert!(shared.contains("beyond shared memory"), "{shared}");
}

#[test]
fn blocks_of_a_launch_keep_to_their_own() {
    let head = ".visible .entry test(.param .u64 p)";
    let body = |to: &str| {
        format!(
            "{OWN} mov.u32 %r2, %ctaid.x; add.s32 %r2, %r2, {to}; mul.wide.s32 %d2, %r2, 128; add.s64 %d1, %d1, %d2; st.global.u32 [%d1], %r1;"
        )
    };
    let (told, _) = outcome_of(head, &body("0"), [2, 1, 1], 32, &[0; 64], &[]);
    assert_eq!(told.unwrap(), Vec::<String>::new());
    let same = body("0").replace("%ctaid.x", "0");
    let (told, _) = outcome_of(head, &same, [2, 1, 1], 32, &[0; 64], &[]);
    let told = told.unwrap_err().to_string();
    assert!(told.contains("writes what cluster 0 has written"), "{told}");
}

#[test]
fn who_waits_for_ever_is_named() {
    // Half of the threads are missing.
    let body = format!("{OWN} setp.lt.s32 %p1, %r1, 32; @%p1 bar.sync 1, 64;");
    let told = fault(&body, 64);
    assert!(told.contains("waits for ever"), "{told}");
    assert!(told.contains("bar.sync"), "{told}");
    // Nobody brings the bytes.
    let body = copied(WAIT).replace("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 256, [%r7];", "");
    let told = fault(&body, 64);
    assert!(told.contains("256 bytes to come"), "{told}");
}

/// Rows of 16 columns are what a box of the copy engine brings; those beyond the tensor are zeros.
#[test]
fn boxes_of_tensors_lie_permuted_and_end_with_zeros() {
    let body = format!(
        "{OWN} .shared .align 128 .b8 t[512]; .shared .align 8 .b8 b[8]; mov.u32 %r2, t; mov.u32 %r7, b;
         cvta.param.u64 %d3, %d4; setp.ne.s32 %p1, %r1, 0; @!%p1 mbarrier.init.shared::cta.b64 [%r7], 1; bar.sync 0;
         @%p1 bra $all; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 512;
         mov.u32 %r8, 0; mov.u32 %r9, 2;
         cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d3, {{%r8, %r9}}], [%r7];
         $all: {WAIT} shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; ld.shared.u32 %r5, [%r3]; bar.sync 0;
         st.global.u32 [%d1], %r5;"
    )
    .replace("cvta.param.u64 %d3, %d4;", "mov.b64 %d4, map; cvta.param.u64 %d3, %d4;");
    let head = ".visible .entry test(.param .u64 p, .param .align 64 .b8 map[128])";
    // Ten rows of 8 words.
    let numbers: Vec<u32> = (0..128).collect();
    let map = Argument::Map(TensorMap {
        address: BASE,
        sizes: vec![16, 10],
        strides: vec![32],
        sides: vec![16, 16],
    });
    let (told, after) = outcome_of(head, &body, [1, 1, 1], 128, &numbers, &[map]);
    assert_eq!(told.unwrap(), Vec::<String>::new());
    let expected = |word: u32| {
        let (row, piece, within) = (word / 8, word / 4 % 2, word % 4);
        // Four rows are 128 bytes, after which pieces change their places.
        let from = (row + 2) * 8 + (piece ^ (row / 4 % 2)) * 4 + within;
        if row < 8 { from } else { 0 }
    };
    assert_eq!(after, (0..128).map(expected).collect::<Vec<_>>());
}

fn half(x: f32) -> u32 {
    x.to_bits() >> 16
}

/// mma and wgmma against sums by hand, in bf16.
#[test]
fn matrix_units_multiply() {
    let a = |row: usize, k: usize| ((row * 7 + k * 3) % 11) as f32 - 5.0;
    let b = |k: usize, column: usize| ((k * 5 + column * 2) % 13) as f32 - 6.0;
    let pair = |x: f32, y: f32| half(x) | half(y) << 16;
    // Each lane's registers in the order of the instruction.
    let mut numbers = vec![0; 32 * 8];
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4 * 2);
        for i in 0..4 {
            let (row, k) = (g + i % 2 * 8, t + i / 2 * 8);
            numbers[lane * 8 + i] = pair(a(row, k), a(row, k + 1));
        }
        for i in 0..2 {
            let k = t + i * 8;
            numbers[lane * 8 + 4 + i] = pair(b(k, g), b(k + 1, g));
        }
    }
    let body = "ld.param.u64 %d0, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %d1, %r1, 32; add.s64 %d1, %d0, %d1;
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d1]; ld.global.v2.u32 {%r6, %r7}, [%d1+16];
        mov.f32 %f1, 0f3F800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f1, %f2, %f3, %f4};
        st.global.v4.f32 [%d1], {%f1, %f2, %f3, %f4};";
    let results = right(body, 32, &numbers);
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            let sum: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            assert_eq!(
                f32::from_bits(results[lane * 8 + i]),
                1.0 + sum,
                "{lane} {i}"
            );
        }
    }
}

/// Both operands in shared memory, as panels of 64 columns whose pieces are permuted: A by rows, B by
/// rows or by columns.
#[test]
fn warpgroups_multiply_what_is_in_shared_memory() {
    let a = |row: usize, k: usize| ((row * 7 + k * 3) % 11) as f32 - 5.0;
    let b = |k: usize, column: usize| ((k * 5 + column * 2) % 13) as f32 - 6.0;
    let place = |row: usize, column: usize| {
        let byte = row * 128 + column * 2;
        (byte ^ (byte >> 7 & 7) << 4) / 2
    };
    for by_column in [false, true] {
        let mut halves = vec![0_u32; 2 * 8192 / 2];
        for row in 0..64 {
            for k in 0..16 {
                halves[place(row, k)] = half(a(row, k));
            }
        }
        for column in 0..32 {
            for k in 0..16 {
                let at = if by_column {
                    place(k, column)
                } else {
                    place(column, k)
                };
                halves[4096 + at] = half(b(k, column));
            }
        }
        let words: Vec<u32> = halves
            .chunks(2)
            .map(|pair| pair[0] | pair[1] << 16)
            .collect();
        let results: Vec<String> = (1..=16).map(|i| format!("%f{i}")).collect();
        let descriptor = |offset: u32| {
            format!(
                "add.s32 %r4, %r2, {offset}; shr.u32 %r4, %r4, 4; cvt.u64.u32 %d3, %r4; or.b64 %d3, %d3, 0x4000004000010000;"
            )
        };
        let body = format!(
            ".shared .align 1024 .b8 t[16384]; ld.param.u64 %d0, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, t;
             mov.u32 %r3, %r1; mov.u32 %r5, 0;
             $fill: mul.wide.u32 %d1, %r3, 4; add.s64 %d1, %d0, %d1; ld.global.u32 %r6, [%d1]; shl.b32 %r7, %r3, 2;
             add.s32 %r7, %r2, %r7; st.shared.u32 [%r7], %r6; add.s32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 4096; @%p1 bra $fill;
             fence.proxy.async.shared::cta; bar.sync 0;
             {} mov.b64 %d4, %d3; {} wgmma.fence.sync.aligned;
             wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{}}}, %d4, %d3, %p2, 1, 1, 0, {};
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; bar.sync 0;
             mul.wide.u32 %d1, %r1, 64; add.s64 %d1, %d0, %d1; {}",
            descriptor(0),
            descriptor(8192),
            results.join(", "),
            u32::from(by_column),
            results
                .iter()
                .enumerate()
                .map(|(i, register)| format!("st.global.f32 [%d1+{}], {register};", 4 * i))
                .collect::<String>(),
        );
        let results = right(&body, 128, &words);
        for thread in 0..128 {
            let (warp, g, t) = (thread / 32, thread % 32 / 4, thread % 4);
            for i in 0..16 {
                let (row, column) = (warp * 16 + g + i % 4 / 2 * 8, i / 4 * 8 + 2 * t + i % 2);
                let sum: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
                let given = f32::from_bits(results[thread * 16 + i]);
                assert_eq!(given, sum, "by column: {by_column}, {row} {column}");
            }
        }
        // Without the fence the matrix units may not see what the threads wrote.
        let body = body.replace("fence.proxy.async.shared::cta;", "");
        let (told, _) = outcome(&body, 128, &words);
        assert!(
            told.unwrap()
                .iter()
                .all(|told| told.contains("for want of a fence"))
        );
    }
}

#[test]
fn blocks_are_no_larger_than_a_kernel_was_made_for() {
    let head = ".visible .entry test(.param .u64 p) .maxntid 64, 1, 1";
    let (told, _) = outcome_of(head, "", [1, 1, 1], 64, &[0], &[]);
    assert_eq!(told.unwrap(), Vec::<String>::new());
    let (told, _) = outcome_of(head, "", [1, 1, 1], 96, &[0], &[]);
    let told = told.unwrap_err().to_string();
    assert_eq!(told, "a block of `test` has 96 threads, and may have 64");
    let large = fault(".shared .align 16 .b8 s[240000];", 32);
    assert_eq!(
        large,
        "a block of `test` has 240000 bytes of shared memory, and may have 232448"
    );
}

/// Three warpgroups that begin with 168 registers a thread, of which one gives up some for the others.
#[test]
fn warps_ask_for_no_more_registers_than_others_give_up() {
    let head = ".visible .entry test(.param .u64 p) .maxntid 384, 1, 1";
    let asking = |first: u32| {
        let body = format!(
            "mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 128; @%p0 bra REST; \
             setmaxnreg.dec.sync.aligned.u32 {first}; bra END; \
             REST: setmaxnreg.inc.sync.aligned.u32 240; END:"
        );
        outcome_of(head, &body, [1, 1, 1], 384, &[0], &[]).0
    };
    assert_eq!(asking(24).unwrap(), Vec::<String>::new());
    assert_eq!(
        asking(32).unwrap_err().to_string(),
        "a block of `test` has 65536 registers, and may have 64512"
    );
}

#[test]
fn what_is_not_known_is_an_error_with_its_line() {
    let text = format!(
        "{HEADER}.visible .entry test(.param .u64 p)\n{{\n.reg .f32 %f<3>;\nsin.approx.f32 %f1, %f2;\nret;\n}}\n"
    );
    assert_eq!(
        parse(&text).unwrap_err().to_string(),
        "line 7 of the PTX has something that is not known: sin.approx.f32 %f1, %f2"
    );
    let (told, _) = outcome_of(
        ".visible .entry test(.param .u64 p, .param .u32 n)",
        "",
        [1, 1, 1],
        32,
        &[0],
        &[],
    );
    assert_eq!(
        told.unwrap_err().to_string(),
        "`test` takes 2 arguments; there are 1"
    );
}
