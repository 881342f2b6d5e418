//! Which rank a process is, by what launchers put into its environment.

use cinch_ranks::{Identity, RanksError};

fn of(variables: &[(&str, &str)]) -> Result<Option<Identity>, RanksError> {
    let variable = |name: &str| {
        let found = variables.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Identity::of(&variable, &|list| match list {
        "node[01-02]" => Ok(vec!["node01".to_owned(), "node02".to_owned()]),
        _ => Err("no such list".to_owned()),
    })
}

fn found(variables: &[(&str, &str)]) -> Identity {
    of(variables).unwrap().unwrap()
}

fn refused(variables: &[(&str, &str)]) -> String {
    of(variables).unwrap_err().to_string()
}

const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "10.0.0.1"),
    ("MASTER_PORT", "29400"),
];

fn with<'a>(
    variables: &[(&'a str, &'a str)],
    changes: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let changed = |name: &str| changes.iter().any(|(key, _)| *key == name);
    let kept = variables.iter().filter(|(name, _)| !changed(name));
    kept.chain(changes).copied().collect()
}

#[test]
fn nobody_says_anything_or_there_is_one_rank() {
    assert_eq!(of(&[]).unwrap(), None);
    assert_eq!(of(&[("WORLD_SIZE", "1")]).unwrap(), None);
    assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
    assert_eq!(
        of(&[("RANK", " "), ("MASTER_PORT", "29500")]).unwrap(),
        None
    );
}

#[test]
fn torchrun_says_all_of_it() {
    let identity = found(&TORCHRUN);
    assert_eq!((identity.rank, identity.num_ranks), (3, 4));
    assert_eq!((identity.local_rank, identity.local_ranks), (1, 2));
    assert_eq!(identity.meeting.host, "10.0.0.1");
    assert_eq!(identity.meeting.ports, [29_400]);
}

/// Its agent listens at the port that it names.
#[test]
fn the_port_of_torchruns_agent_is_left_to_it() {
    let agent = [
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "a7"),
    ];
    let identity = found(&with(&TORCHRUN, &agent));
    assert_eq!(identity.meeting.ports[..2], [29_401, 29_402]);
    assert!(identity.meeting.run.contains("a7"));
}

#[test]
fn mpi_counts_its_own_way() {
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-node-77@1"),
    ];
    let identity = found(&open_mpi);
    assert_eq!((identity.rank, identity.local_rank), (1, 1));
    assert_eq!(identity.meeting.host, "127.0.0.1");
    let other = found(&with(&open_mpi, &[("PMIX_NAMESPACE", "prterun-node-78@1")]));
    assert_ne!(identity.meeting.ports, other.meeting.ports);
    let mpich = [
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "3"),
        ("MPI_LOCALRANKID", "0"),
    ];
    assert_eq!(found(&mpich).num_ranks, 3);
    let apart = with(
        &open_mpi,
        &[
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ],
    );
    assert!(
        refused(&apart).contains("MASTER_ADDR is not set"),
        "{}",
        refused(&apart)
    );
}

const SLURM: [(&str, &str); 6] = [
    ("SLURM_PROCID", "2"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_JOB_NODELIST", "node[01-02]"),
];

#[test]
fn slurms_first_node_is_where_ranks_meet() {
    let identity = found(&SLURM);
    assert_eq!((identity.rank, identity.num_ranks), (2, 4));
    assert_eq!((identity.local_rank, identity.local_ranks), (0, 2));
    assert_eq!(identity.meeting.host, "node01");
    let unread = refused(&with(&SLURM, &[("SLURM_JOB_NODELIST", "node[1")]));
    assert!(
        unread.contains("no such list") && unread.contains("MASTER_ADDR"),
        "{unread}"
    );
}

/// The script of a batch job is told of the job's tasks, but is none of them.
#[test]
fn a_batch_script_is_no_rank() {
    let script: Vec<_> = SLURM
        .into_iter()
        .filter(|(name, _)| *name != "SLURM_STEP_ID")
        .collect();
    assert_eq!(of(&script).unwrap(), None);
}

#[test]
fn torchrun_inside_srun_counts() {
    assert_eq!(found(&with(&SLURM, &TORCHRUN)).rank, 3);
}

#[test]
fn what_is_missing_or_contradicts_is_named_with_its_value() {
    let cases = [
        (vec![("RANK", "1")], "WORLD_SIZE is not set"),
        (vec![("WORLD_SIZE", "4")], "RANK is not set"),
        (with(&TORCHRUN, &[("RANK", "two")]), "RANK=\"two\""),
        (with(&TORCHRUN, &[("RANK", "-1")]), "RANK=\"-1\""),
        (
            with(&TORCHRUN, &[("RANK", "4")]),
            "RANK=\"4\": it must be below WORLD_SIZE=4",
        ),
        (with(&TORCHRUN, &[("WORLD_SIZE", "0")]), "WORLD_SIZE=\"0\""),
        (with(&TORCHRUN, &[("LOCAL_RANK", "2")]), "LOCAL_RANK=\"2\""),
        (
            with(&TORCHRUN, &[("LOCAL_RANK", "")]),
            "LOCAL_RANK is not set",
        ),
        (
            with(&TORCHRUN, &[("LOCAL_WORLD_SIZE", "9")]),
            "LOCAL_WORLD_SIZE=\"9\"",
        ),
        (
            with(&TORCHRUN, &[("MASTER_PORT", "99999")]),
            "MASTER_PORT=\"99999\"",
        ),
        (
            with(&TORCHRUN, &[("MASTER_PORT", "0")]),
            "MASTER_PORT=\"0\"",
        ),
        (
            with(&TORCHRUN, &[("MASTER_ADDR", "")]),
            "MASTER_ADDR is not set",
        ),
    ];
    for (variables, wanted) in cases {
        let message = refused(&variables);
        assert!(message.contains(wanted), "{message}");
        assert!(message.contains("hint:"), "{message}");
    }
}
