//! Ranks that end, fail, fall silent or are late: the others are let go, and all name the same one.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cinch_ranks::{Cause, Greeting, Limits, Loss, RanksError, Topology, World};

fn worlds(num_ranks: usize, limits: Limits) -> Vec<World> {
    World::loopback(num_ranks, &Greeting::default(), limits, Topology::Mesh).unwrap()
}

/// What the ranks other than `who` come to when they go on exchanging while `who` does `act`.
fn losses(num_ranks: usize, limits: Limits, who: usize, act: fn(World)) -> Vec<Loss> {
    let (done, wait) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let mut wait = Some(wait);
        let mut others = Vec::new();
        for mut world in worlds(num_ranks, limits) {
            if world.rank() == who {
                let wait = wait.take();
                scope.spawn(move || {
                    world.barrier().unwrap();
                    act(world);
                    drop(wait);
                });
            } else {
                others.push(scope.spawn(move || {
                    let mut values = vec![1.0_f32; 100_000];
                    // The other may be past the barrier, and gone, before this one is.
                    let mut exchanged = world.barrier();
                    while exchanged.is_ok() {
                        exchanged = world.all_reduce(&mut values);
                    }
                    match exchanged {
                        Err(RanksError::Lost(loss)) => loss,
                        other => panic!("{other:?}"),
                    }
                }));
            }
        }
        let losses = others
            .into_iter()
            .map(|other| other.join().unwrap())
            .collect();
        drop(done);
        losses
    })
}

#[test]
fn a_rank_that_ends_lets_all_others_go() {
    for who in 0..3 {
        for loss in losses(3, Limits::default(), who, drop) {
            assert_eq!((loss.rank, &loss.cause), (who, &Cause::Ended));
            assert_eq!(loss.pid, std::process::id());
            assert!(loss.to_string().contains("ended or was killed"), "{loss}");
        }
    }
}

#[test]
fn a_rank_that_fails_says_why() {
    for who in 0..3 {
        let fail = |world: World| world.fail("no space left in /data");
        for loss in losses(3, Limits::default(), who, fail) {
            assert_eq!(loss.rank, who);
            let told = loss.to_string();
            assert!(told.contains("failed: no space left in /data"), "{told}");
        }
    }
}

/// It beats, but does not come.
#[test]
fn a_rank_that_is_late_is_given_up() {
    let limits = Limits {
        exchange: Duration::from_millis(200),
        silence: Duration::from_secs(1),
        ..Limits::default()
    };
    let late = |world: World| {
        let (told, lost) = mpsc::channel();
        world.on_loss(move |loss| told.send(loss.clone()).unwrap());
        // It is told as well.
        assert_eq!(lost.recv().unwrap().rank, 1);
    };
    for loss in losses(3, limits, 1, late) {
        assert_eq!(
            (loss.rank, &loss.cause),
            (1, &Cause::Waited(limits.exchange))
        );
    }
}

#[test]
fn a_loss_is_told_where_nobody_waits() {
    let mut worlds = worlds(3, Limits::default());
    let lost = worlds.remove(1);
    let (told, heard) = mpsc::channel();
    for world in &worlds {
        let told = told.clone();
        world.on_loss(move |loss| told.send(loss.rank).unwrap());
    }
    drop(lost);
    assert_eq!([heard.recv(), heard.recv()], [Ok(1), Ok(1)]);
    assert!(worlds.iter().all(|world| world.loss().is_some()));
}

#[test]
fn who_leaves_is_not_lost() {
    let mut worlds = worlds(2, Limits::default());
    let mut other = worlds.remove(1);
    let mut first = worlds.remove(0);
    let (told, heard) = mpsc::channel();
    first.on_loss(move |loss| told.send(loss.clone()).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| other.leave().unwrap());
        first.leave().unwrap();
    });
    drop((first, other));
    assert!(heard.recv().is_err(), "the channel closes with the world");
}
