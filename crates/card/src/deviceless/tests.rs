//! The questions of a rehearsed process, answered by functions that stand for cuDNN's.

use std::cell::Cell;
use std::ffi::c_void;

use super::*;

const CONFIGURATION: c_int = 3;
const WORKSPACE: i64 = 77 << 20;
/// What the configuration's engine notes of itself: `SUPPORTS_CUDA_GRAPH_NATIVE_API`, and perhaps another.
const GRAPHS: c_int = 3;

thread_local! {
    static CREATED: Cell<u64> = const { Cell::new(1 << 32) };
    static DESTROYED: Cell<u32> = const { Cell::new(0) };
    static PLANS_FINALISED: Cell<u32> = const { Cell::new(0) };
    static NOTES: Cell<[c_int; 2]> = const { Cell::new([GRAPHS, GRAPHS]) };
}

/// Descriptors are numbers whose remainder by 64 is their kind.
unsafe extern "C" fn create(kind: c_int, descriptor: *mut Descriptor) -> c_int {
    let number = CREATED.get() + 64;
    CREATED.set(number);
    // SAFETY: the caller's place for a descriptor.
    unsafe { *descriptor = (number + kind as u64) as Descriptor };
    0
}

unsafe extern "C" fn destroy(_: Descriptor) -> c_int {
    DESTROYED.set(DESTROYED.get() + 1);
    0
}

unsafe extern "C" fn set(_: Descriptor, _: c_int, _: c_int, _: i64, _: *const c_void) -> c_int {
    0
}

unsafe extern "C" fn finalize(descriptor: Descriptor) -> c_int {
    if descriptor as u64 % 64 == EXECUTION_PLAN as u64 {
        PLANS_FINALISED.set(PLANS_FINALISED.get() + 1);
    }
    0
}

unsafe extern "C" fn get(
    _: Descriptor,
    name: c_int,
    _: c_int,
    requested: i64,
    count: *mut i64,
    array: *mut c_void,
) -> c_int {
    // SAFETY: the caller's places, of as many elements as were requested.
    unsafe {
        match name {
            CONFIGURATION_ENGINE => *count = 1,
            CONFIGURATION_WORKSPACE | PLAN_WORKSPACE if requested == 1 => {
                *count = 1;
                *array.cast::<i64>() = WORKSPACE;
            }
            ENGINE_BEHAVIOUR if requested >= 2 => {
                *count = 2;
                *array.cast::<[c_int; 2]>() = NOTES.get();
            }
            PLAN_JSON => *count = 0,
            _ => return BAD_PARAMETER,
        }
    }
    0
}

fn deviceless(notes: [c_int; 2]) -> Deviceless {
    NOTES.set(notes);
    PLANS_FINALISED.set(0);
    Deviceless {
        functions: Functions {
            create,
            destroy,
            set,
            finalize,
            get,
        },
        properties: std::ptr::null_mut(),
        kinds: BTreeMap::new(),
        uncompiled: BTreeMap::new(),
    }
}

fn ask(deviceless: &mut Deviceless, operation: u32, numbers: [i64; 4], array: &[u8]) -> Answer {
    deviceless.answer(&Question {
        operation,
        numbers,
        array: array.to_vec(),
    })
}

/// A plan with a configuration, finalised as the caller sees it.
fn plan(deviceless: &mut Deviceless) -> i64 {
    let kind = |kind: c_int| [i64::from(kind), 0, 0, 0];
    let configuration = ask(deviceless, CREATE, kind(CONFIGURATION), &[]).number;
    let plan = ask(deviceless, CREATE, kind(EXECUTION_PLAN), &[]).number;
    let numbers = [plan, PLAN_CONFIGURATION.into(), TYPE_DESCRIPTOR.into(), 1];
    let array = configuration.to_le_bytes();
    assert_eq!(ask(deviceless, SET, numbers, &array).status, 0);
    assert_eq!(ask(deviceless, FINALIZE, [plan, 0, 0, 0], &[]).status, 0);
    plan
}

fn workspace(deviceless: &mut Deviceless, plan: i64) -> i64 {
    let numbers = [plan, PLAN_WORKSPACE.into(), TYPE_INT64.into(), 1];
    let answer = ask(deviceless, GET, numbers, &[0; 8]);
    assert_eq!((answer.status, answer.number), (0, 1));
    i64::from_le_bytes(answer.array.try_into().unwrap())
}

#[test]
fn a_plan_that_would_be_compiled_tells_its_workspace_without() {
    let mut deviceless = deviceless([GRAPHS, COMPILES_AT_RUN_TIME]);
    let plan = plan(&mut deviceless);
    assert_eq!(workspace(&mut deviceless, plan), WORKSPACE);
    assert_eq!(workspace(&mut deviceless, plan), WORKSPACE);
    assert_eq!(PLANS_FINALISED.get(), 0);
}

#[test]
fn a_plan_that_is_not_compiled_is_finalised() {
    let mut deviceless = deviceless([GRAPHS, GRAPHS]);
    let plan = plan(&mut deviceless);
    assert_eq!(PLANS_FINALISED.get(), 1);
    assert_eq!(workspace(&mut deviceless, plan), WORKSPACE);
}

#[test]
fn a_plan_that_is_asked_for_more_than_its_workspace_is_compiled_once() {
    let mut deviceless = deviceless([COMPILES_AT_RUN_TIME, GRAPHS]);
    let plan = plan(&mut deviceless);
    for _ in 0..2 {
        let numbers = [plan, PLAN_JSON.into(), TYPE_CHAR.into(), 0];
        assert_eq!(ask(&mut deviceless, GET, numbers, &[]).status, 0);
    }
    assert_eq!(PLANS_FINALISED.get(), 1);
    assert_eq!(workspace(&mut deviceless, plan), WORKSPACE);
}

#[test]
fn a_destroyed_plan_and_the_engines_looked_at_are_forgotten() {
    let mut deviceless = deviceless([COMPILES_AT_RUN_TIME, GRAPHS]);
    DESTROYED.set(0);
    let plan = plan(&mut deviceless);
    assert_eq!(DESTROYED.get(), 1);
    ask(&mut deviceless, DESTROY, [plan, 0, 0, 0], &[]);
    assert!(deviceless.uncompiled.is_empty());
    let numbers = [plan, PLAN_WORKSPACE.into(), TYPE_INT64.into(), 1];
    let answer = ask(&mut deviceless, GET, numbers, &[0; 8]);
    assert_eq!(answer.status, BAD_PARAMETER);
}
