//! How ranks meet, who is refused, and what they are told.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use cinch_ranks::{Greeting, Identity, Limits, Meeting, RanksError, Topology, World};

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn identity(rank: usize, num_ranks: usize, ports: &[u16], run: &str) -> Identity {
    Identity {
        rank,
        num_ranks,
        local_rank: rank,
        local_ranks: num_ranks,
        meeting: Meeting {
            host: "127.0.0.1".to_owned(),
            ports: ports.to_vec(),
            is_inherited: false,
            run: run.to_owned(),
        },
    }
}

fn greeting(version: &str, settings: &[(&str, &str)]) -> Greeting {
    let settings = settings
        .iter()
        .map(|(key, value)| (key.to_string(), value.to_string()));
    Greeting {
        version: version.to_owned(),
        settings: settings.collect::<BTreeMap<_, _>>(),
    }
}

/// What ranks are told that come with these identities and greetings.
fn told(parties: Vec<(Identity, Greeting)>, limits: Limits) -> Vec<Result<(), RanksError>> {
    thread::scope(|scope| {
        let join = |(identity, greeting): (Identity, Greeting)| {
            let mut world = World::join(&identity, &greeting, limits, Topology::Mesh)?;
            world.leave()
        };
        let ranks: Vec<_> = parties
            .into_iter()
            .map(|party| scope.spawn(move || join(party)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn refusals(parties: Vec<(Identity, Greeting)>) -> Vec<String> {
    let told = told(parties, Limits::default());
    told.into_iter()
        .map(|told| told.unwrap_err().to_string())
        .collect()
}

#[test]
fn four_ranks_meet() {
    let port = free_port();
    let party = |rank| {
        (
            identity(rank, 4, &[port], "a"),
            greeting("1", &[("seed", "1")]),
        )
    };
    let told = told([2, 0, 3, 1].map(party).into(), Limits::default());
    assert_eq!(told, [Ok(()), Ok(()), Ok(()), Ok(())]);
}

#[test]
fn a_differing_setting_is_named_with_both_values_on_both_ranks() {
    let port = free_port();
    let settings = [
        [("model.size", "tiny"), ("training.seed", "1")],
        [("model.size", "tiny"), ("training.seed", "2")],
    ];
    let party = |rank: usize| {
        (
            identity(rank, 2, &[port], ""),
            greeting("1", &settings[rank]),
        )
    };
    for message in refusals(vec![party(0), party(1)]) {
        assert!(
            message.contains("training.seed: 2 on rank 1, 1 on rank 0"),
            "{message}"
        );
        assert!(!message.contains("model.size"), "{message}");
    }
}

#[test]
fn a_setting_that_one_rank_does_not_have_is_named() {
    let port = free_port();
    let first = (
        identity(0, 2, &[port], ""),
        greeting("1", &[("training.lora_r", "8")]),
    );
    let other = (identity(1, 2, &[port], ""), greeting("1", &[]));
    for message in refusals(vec![first, other]) {
        assert!(
            message.contains("training.lora_r: not set on rank 1, 8 on rank 0"),
            "{message}"
        );
    }
}

#[test]
fn other_versions_and_other_numbers_of_ranks_are_refused() {
    let port = free_port();
    let party = |rank, version| (identity(rank, 2, &[port], ""), greeting(version, &[]));
    for message in refusals(vec![party(0, "0.1.0"), party(1, "0.2.0")]) {
        assert!(
            message.contains("rank 1 is cinch 0.2.0, rank 0 is cinch 0.1.0"),
            "{message}"
        );
    }
    let port = free_port();
    let party = |rank, num_ranks| (identity(rank, num_ranks, &[port], ""), Greeting::default());
    for message in refusals(vec![party(0, 2), party(1, 4)]) {
        assert!(
            message.contains("told of 4 ranks, rank 0 of 2"),
            "{message}"
        );
    }
}

#[test]
fn two_that_say_they_are_the_same_rank_are_refused() {
    let port = free_port();
    let party = |rank| (identity(rank, 3, &[port], ""), Greeting::default());
    for message in refusals(vec![party(0), party(1), party(1)]) {
        assert!(
            message.contains("two processes say that they are rank 1"),
            "{message}"
        );
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let told = told(
        vec![(identity(0, 2, &[port], ""), Greeting::default())],
        Limits::default(),
    );
    let message = told[0].as_ref().unwrap_err().to_string();
    assert!(message.contains(&format!("127.0.0.1:{port}")), "{message}");
    assert!(
        message.contains("in use") && message.contains("MASTER_PORT"),
        "{message}"
    );
}

/// As under torchrun, whose agent has the first port, and beside another run that has the next.
#[test]
fn ranks_meet_at_the_next_port_where_others_have_the_first() {
    let ports = [free_port(), free_port()];
    let theirs = |rank| {
        let identity = identity(rank, 2, &ports[..1], "theirs");
        told(vec![(identity, Greeting::default())], Limits::default())
    };
    let ours = |rank| (identity(rank, 2, &ports, "ours"), Greeting::default());
    let told = thread::scope(|scope| {
        let first = scope.spawn(|| theirs(0));
        // The first port is theirs before one of ours comes.
        while TcpStream::connect(("127.0.0.1", ports[0])).is_err() {
            thread::yield_now();
        }
        let ours = told(vec![ours(0), ours(1)], Limits::default());
        let second = theirs(1);
        [first.join().unwrap(), ours, second].concat()
    });
    assert!(told.iter().all(Result::is_ok), "{told:?}");
}

#[test]
fn strangers_at_the_port_are_not_ranks() {
    let port = free_port();
    let party = |rank| (identity(rank, 2, &[port], ""), Greeting::default());
    let told = thread::scope(|scope| {
        let ranks = scope.spawn(move || told(vec![party(0)], Limits::default()));
        let mut stranger = loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                break stream;
            }
        };
        stranger
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let other = told(vec![party(1)], Limits::default());
        [ranks.join().unwrap(), other].concat()
    });
    assert_eq!(told, [Ok(()), Ok(())]);
}

#[test]
fn who_does_not_come_is_named_in_time() {
    let limits = Limits {
        meeting: Duration::from_millis(300),
        ..Limits::default()
    };
    let port = free_port();
    let party = |rank| (identity(rank, 4, &[port], ""), Greeting::default());
    let told = told(vec![party(0), party(2)], limits);
    let message = told[0].as_ref().unwrap_err().to_string();
    assert!(
        message.contains("ranks 1, 3 of 4 did not come"),
        "{message}"
    );
    assert!(message.contains("CINCH_MEETING_SECONDS"), "{message}");
    let message = told[1].as_ref().unwrap_err().to_string();
    assert!(message.contains("rank 0 was not found"), "{message}");
}
