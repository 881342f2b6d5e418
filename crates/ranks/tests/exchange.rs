//! What ranks exchange, in threads of one process.

use std::thread;

use cinch_ranks::{Greeting, Limits, RanksError, Topology, World};

/// What each rank comes to, by rank.
fn each<R: Send>(
    num_ranks: usize,
    topology: Topology,
    act: impl Fn(&mut World) -> Result<R, RanksError> + Sync,
) -> Vec<R> {
    let worlds = World::loopback(num_ranks, &Greeting::default(), Limits::default(), topology);
    let act = &act;
    thread::scope(|scope| {
        let ranks = worlds.unwrap().into_iter().map(|mut world| {
            scope.spawn(move || {
                let result = act(&mut world).unwrap();
                world.leave().unwrap();
                result
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A number of a rank at a place that sums round differently in another order.
fn number(rank: usize, index: usize) -> f32 {
    let bits = (rank as u32 + 1).wrapping_mul(2_654_435_761) ^ (index as u32).wrapping_mul(40_503);
    (bits % 10_007) as f32 * 1.1e-3 + 10.0_f32.powi((bits % 5) as i32)
}

fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| number(rank, index)).collect()
}

/// In the order of ranks.
fn sums(num_ranks: usize, len: usize) -> Vec<f32> {
    let sum = |index| (1..num_ranks).fold(number(0, index), |sum, rank| sum + number(rank, index));
    (0..len).map(sum).collect()
}

/// Lengths with pieces, without, with ranks that own nothing.
const LENGTHS: [usize; 5] = [0, 1, 5, 1000, 300_000];

#[test]
fn sums_are_those_of_rank_order_to_the_bit_on_every_rank() {
    for num_ranks in [2, 3, 4] {
        for topology in [Topology::Mesh, Topology::Star] {
            let found = each(num_ranks, topology, |world| {
                let mut all = Vec::new();
                for len in LENGTHS {
                    let mut values = numbers(world.rank(), len);
                    world.all_reduce(&mut values)?;
                    all.push(values);
                }
                Ok(all)
            });
            let wanted: Vec<_> = LENGTHS.iter().map(|&len| sums(num_ranks, len)).collect();
            for rank in found {
                assert!(rank == wanted, "{num_ranks} ranks");
            }
        }
    }
    let other = (0..1000)
        .map(|index| number(3, index) + number(2, index) + number(1, index) + number(0, index));
    assert_ne!(other.collect::<Vec<_>>(), sums(4, 1000), "the order counts");
}

#[test]
fn parts_are_scattered_and_gathered() {
    const PART: usize = 70_016;
    let len = 200_000;
    let found = each(3, Topology::Mesh, |world| {
        let values = numbers(world.rank(), len);
        let mut own = vec![0.5; PART];
        world.reduce_scatter(&values, PART, &mut own, false)?;
        let written = own.clone();
        world.reduce_scatter(&values, PART, &mut own, true)?;
        let mut whole = vec![0.0; len];
        world.all_gather(&written, PART, &mut whole)?;
        let mut doubled = vec![0.0; len];
        world.all_gather(&own, PART, &mut doubled)?;
        Ok((whole, doubled, written))
    });
    let wanted = sums(3, len);
    let twice: Vec<f32> = wanted.iter().map(|sum| sum + sum).collect();
    for (whole, doubled, _) in &found {
        assert!(*whole == wanted && *doubled == twice);
    }
    // Beyond the end of the tensor, nothing is touched.
    assert!(
        found[2].2[len - 2 * PART..]
            .iter()
            .all(|&value| value == 0.5)
    );
}

#[test]
fn a_star_has_no_parts() {
    each(2, Topology::Star, |world| {
        let refused = world.reduce_scatter(&[1.0_f32], 1, &mut [0.0], false);
        assert!(matches!(refused, Err(RanksError::NoMesh)));
        Ok(())
    });
}

#[test]
fn doubles_texts_and_bytes_travel() {
    let found = each(3, Topology::Star, |world| {
        let rank = world.rank();
        let mut counts = [rank as f64, 1.0];
        world.sum(&mut counts)?;
        let mut bytes = match rank {
            0 => vec![7_u8; 600_000],
            _ => vec![0; 600_000],
        };
        world.broadcast(&mut bytes)?;
        assert!(bytes.iter().all(|&byte| byte == 7));
        let texts = world.collect(&"é".repeat(rank))?;
        let spread = world.spread(&format!("from {rank}"))?;
        world.require_same("data", "fingerprint")?;
        world.barrier()?;
        Ok((counts, texts, spread))
    });
    assert!(found.iter().all(|(counts, ..)| *counts == [3.0, 3.0]));
    assert!(found.iter().all(|(.., spread)| spread == "from 0"));
    assert_eq!(found[0].1, ["", "é", "éé"]);
}

#[test]
fn ranks_that_differ_are_told_in_what_on_every_rank() {
    let found = each(3, Topology::Mesh, |world| {
        let value = if world.rank() == 1 { "b" } else { "a" };
        let told = world
            .require_same("the data", value)
            .unwrap_err()
            .to_string();
        Ok(told)
    });
    let wanted = "the ranks differ in the data: a on rank 0, b on rank 1, a on rank 2";
    assert_eq!(found, [wanted; 3]);
}

/// Ranks that do not do the same are an error, and none waits for ever.
#[test]
fn ranks_out_of_step_are_found() {
    let worlds = World::loopback(2, &Greeting::default(), Limits::default(), Topology::Mesh);
    let told: Vec<String> = thread::scope(|scope| {
        let ranks = worlds.unwrap().into_iter().map(|mut world| {
            scope.spawn(move || {
                let mut values = vec![0.0_f32; 10 + world.rank()];
                let error = world.all_reduce(&mut values).unwrap_err().to_string();
                world.fail(&error);
                error
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(
        told.iter()
            .any(|told| told.contains("not at the same place")),
        "{told:?}"
    );
}

#[test]
fn a_few_numbers_of_each_rank_come_to_the_first() {
    for topology in [Topology::Mesh, Topology::Star] {
        let all = each(3, topology, |world| {
            let own = [world.rank() as f64, -0.5];
            world.collect_numbers(&own)
        });
        assert_eq!(all[0], [0.0, -0.5, 1.0, -0.5, 2.0, -0.5]);
        assert_eq!(all[2], [2.0, -0.5]);
    }
}

/// Whoever comes first stands in the exchange until the last one is there.
#[test]
fn waiting_is_counted() {
    let waited = each(2, Topology::Star, |world| {
        if world.rank() == 1 {
            // Long against what a message takes; the other rank cannot be done before.
            thread::sleep(std::time::Duration::from_millis(300));
        }
        world.sum(&mut [1.0])?;
        Ok(world.waited())
    });
    assert!(
        waited[0] > std::time::Duration::ZERO && waited[0] > waited[1],
        "{waited:?}"
    );
}
