//! How GPUs reach each other: links inside a machine and networks between machines, as data.
//!
//! Rates are those of data sheets in one direction, for one GPU; programs reach a share of them.
//! Latencies are of one message of a ring between two neighbours, as NCCL's own tuning table has
//! them for long messages.

use crate::catalogue::LINK_SHARE;
use crate::error::DeviceError;

/// A kind of link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interconnect {
    pub name: &'static str,
    /// Bytes per second of one GPU in one direction, as the data sheet has them.
    pub peak: f64,
    /// Seconds that one message takes besides its bytes.
    pub latency: f64,
}

impl Interconnect {
    /// What long messages reach.
    pub fn reached(self) -> f64 {
        self.peak * LINK_SHARE
    }
}

/// What the GPUs of a run are joined by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fabric {
    /// Inside a machine.
    pub link: Interconnect,
    /// Between machines, for each GPU.
    pub network: Interconnect,
}

const fn link(name: &'static str, gigabytes: f64, microseconds: f64) -> Interconnect {
    Interconnect {
        name,
        peak: gigabytes * 1e9,
        latency: microseconds * 1e-6,
    }
}

/// A network adapter of so many Gbit/s.
const fn adapter(name: &'static str, gigabits: f64, microseconds: f64) -> Interconnect {
    link(name, gigabits / 8.0, microseconds)
}

/// Between GPUs by NVLink, through switches or direct.
const NVLINK: f64 = 3.4;
/// Over PCIe, through the host's bridges.
const PCIE: f64 = 5.7;
/// By adapters that write into a GPU's memory themselves.
const REMOTE: f64 = 14.0;
/// Through the host's network stack.
const SOCKETS: f64 = 50.0;

pub const NVLINK2: Interconnect = link("nvlink2", 150.0, NVLINK);
pub const NVLINK3: Interconnect = link("nvlink3", 300.0, NVLINK);
pub const NVLINK4: Interconnect = link("nvlink4", 450.0, NVLINK);
pub const NVLINK5: Interconnect = link("nvlink5", 900.0, NVLINK);
const INFINITY_FABRIC: Interconnect = link("infinity-fabric", 448.0, NVLINK);
const PCIE3: Interconnect = link("pcie3", 15.75, PCIE);
const PCIE4: Interconnect = link("pcie4", 31.5, PCIE);
const PCIE5: Interconnect = link("pcie5", 63.0, PCIE);
const INFINIBAND_50: Interconnect = adapter("infiniband-50", 50.0, REMOTE);
const INFINIBAND_200: Interconnect = adapter("infiniband-200", 200.0, REMOTE);
const INFINIBAND_400: Interconnect = adapter("infiniband-400", 400.0, REMOTE);
const ETHERNET_10: Interconnect = adapter("ethernet-10", 10.0, SOCKETS);
const ETHERNET_100: Interconnect = adapter("ethernet-100", 100.0, SOCKETS);
/// What processes of one machine reach by loopback, of which each CPU rank has one.
const LOOPBACK: Interconnect = link("loopback", 2.0, 25.0);

/// Every link that is known by name, the fastest of each kind last.
pub const INTERCONNECTS: &[Interconnect] = &[
    PCIE3,
    PCIE4,
    PCIE5,
    NVLINK2,
    NVLINK3,
    NVLINK4,
    NVLINK5,
    INFINITY_FABRIC,
    LOOPBACK,
    ETHERNET_10,
    adapter("ethernet-25", 25.0, SOCKETS),
    adapter("ethernet-50", 50.0, SOCKETS),
    ETHERNET_100,
    adapter("ethernet-200", 200.0, SOCKETS),
    adapter("ethernet-400", 400.0, SOCKETS),
    adapter("roce-100", 100.0, REMOTE),
    adapter("roce-200", 200.0, REMOTE),
    adapter("roce-400", 400.0, REMOTE),
    INFINIBAND_50,
    adapter("infiniband-100", 100.0, REMOTE),
    INFINIBAND_200,
    INFINIBAND_400,
    adapter("infiniband-800", 800.0, REMOTE),
];

impl Fabric {
    /// Machines with eight V100: NVLink, and an adapter of 100 Gbit/s for two GPUs.
    pub const V100_SXM: Self = Self {
        link: NVLINK2,
        network: INFINIBAND_50,
    };
    /// With eight A100 and as many adapters.
    pub const A100_SXM: Self = Self {
        link: NVLINK3,
        network: INFINIBAND_200,
    };
    /// With eight H100 or H200 and as many adapters.
    pub const HOPPER_SXM: Self = Self {
        link: NVLINK4,
        network: INFINIBAND_400,
    };
    pub const BLACKWELL_SXM: Self = Self {
        link: NVLINK5,
        network: INFINIBAND_400,
    };
    pub const MI300X: Self = Self {
        link: INFINITY_FABRIC,
        network: INFINIBAND_400,
    };
    /// Processes of one machine.
    pub const CPU: Self = Self {
        link: LOOPBACK,
        network: ETHERNET_10,
    };

    /// Cards in slots: the bus between them, and the network of a server.
    pub(crate) const fn slots(generation: u32) -> Self {
        let link = match generation {
            0..=3 => PCIE3,
            4 => PCIE4,
            _ => PCIE5,
        };
        Self {
            link,
            network: ETHERNET_100,
        }
    }

    /// With other links than the usual: each a name of [`INTERCONNECTS`], or GB/s of one GPU in
    /// one direction.
    pub fn with(self, link: Option<&str>, network: Option<&str>) -> Result<Self, DeviceError> {
        let named = |name: Option<&str>, usual: Interconnect| match name {
            None => Ok(usual),
            Some(name) => find_interconnect(name, usual.latency),
        };
        Ok(Self {
            link: named(link, self.link)?,
            network: named(network, self.network)?,
        })
    }

    /// Seconds of a ring over all ranks in which each sends so many bytes in so many rounds.
    ///
    /// Between machines as many rings run side by side as a machine has GPUs, each out through an
    /// adapter of its own, and each with its share of the links inside. A message goes through a
    /// machine of `k` GPUs by `k − 1` links and leaves it by one more: that is a lap. In a lap each
    /// link carries `k` messages one after the other. So a lap takes as long as its narrowest link
    /// is busy, or as long as one message is on its way, whichever is longer.
    pub fn ring_seconds(
        &self,
        bytes: f64,
        rounds: u64,
        ranks_per_node: usize,
        nodes: usize,
    ) -> f64 {
        if rounds == 0 {
            return 0.0;
        }
        let round = bytes / rounds as f64;
        let inside = round / self.link.reached();
        if nodes <= 1 {
            return rounds as f64 * (inside + self.link.latency);
        }
        let each = ranks_per_node.max(1) as f64;
        let outside = round / each / self.network.reached();
        let others = each - 1.0;
        let widest = match others > 0.0 {
            true => inside.max(outside),
            false => outside,
        };
        let on_its_way = outside + self.network.latency + others * (inside + self.link.latency);
        rounds as f64 / each * on_its_way.max(each * widest)
    }
}

fn find_interconnect(name: &str, latency: f64) -> Result<Interconnect, DeviceError> {
    let plain = |name: &str| -> String {
        let kept = name.chars().filter(|c| c.is_ascii_alphanumeric());
        kept.map(|c| c.to_ascii_lowercase()).collect()
    };
    let wanted = plain(name);
    let known = INTERCONNECTS.iter();
    if let Some(known) = known.clone().find(|known| plain(known.name) == wanted) {
        return Ok(*known);
    }
    match name.trim().parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(Interconnect {
            name: "stated",
            peak: rate * 1e9,
            latency,
        }),
        _ => Err(DeviceError::UnknownLink {
            name: name.to_owned(),
            known: known.map(|known| known.name).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_by_name_and_by_rate() {
        let usual = Fabric::HOPPER_SXM;
        let other = usual.with(Some("NVLink 3"), Some("12.5")).unwrap();
        assert_eq!(other.link, NVLINK3);
        assert_eq!(other.network.peak, 12.5e9);
        let error = usual.with(None, Some("carrier pigeon")).unwrap_err();
        assert!(error.to_string().contains("infiniband-400"), "{error}");
        assert!(usual.with(Some("-1"), None).is_err());
        assert!(usual.with(Some("nan"), None).is_err());
    }

    #[test]
    fn a_ring_is_as_fast_as_its_narrowest_place() {
        let fabric = Fabric::A100_SXM;
        let is_near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} {b}");
        // Long messages: the bytes alone.
        is_near(fabric.ring_seconds(1e12, 7, 8, 1), 1e12 / NVLINK3.reached());
        // Eight adapters of 25 GB/s are less than NVLink's 300, and more than the bus's 31.5.
        is_near(
            fabric.ring_seconds(1e12, 15, 8, 2),
            1e12 / (8.0 * INFINIBAND_200.reached()),
        );
        let slots = fabric.with(Some("pcie4"), None).unwrap();
        is_near(slots.ring_seconds(1e12, 15, 8, 2), 1e12 / PCIE4.reached());
        let alone = fabric.ring_seconds(1e12, 1, 1, 2);
        is_near(alone, 1e12 / INFINIBAND_200.reached());
        // Short ones: the rounds alone.
        is_near(fabric.ring_seconds(0.0, 7, 8, 1), 7.0 * fabric.link.latency);
        let lap = 7.0 * fabric.link.latency + fabric.network.latency;
        is_near(fabric.ring_seconds(0.0, 16, 8, 2), 2.0 * lap);
        assert_eq!(fabric.ring_seconds(1e6, 0, 8, 2), 0.0);
    }

    /// The formula beside a ring of which every message is followed.
    #[test]
    fn a_simulated_ring_takes_as_long() {
        for fabric in [Fabric::A100_SXM, Fabric::HOPPER_SXM, Fabric::slots(4)] {
            for (per_node, nodes) in [(2, 1), (8, 1), (1, 4), (4, 2), (8, 4), (8, 32)] {
                for bytes in [1e5, 1e7, 4e8] {
                    let rounds = (per_node * nodes - 1) as u64;
                    let found = fabric.ring_seconds(bytes, rounds, per_node, nodes);
                    let wanted = simulated(&fabric, bytes, rounds, per_node, nodes);
                    let what = format!("{bytes} over {per_node} × {nodes}");
                    // A ring ends in the middle of a lap.
                    let lap = wanted / (rounds as f64 / per_node as f64).max(1.0);
                    assert!(
                        (found - wanted).abs() <= 0.6 * lap,
                        "{what}: {found} {wanted}"
                    );
                }
            }
        }
    }

    fn simulated(fabric: &Fabric, bytes: f64, rounds: u64, per_node: usize, nodes: usize) -> f64 {
        let ranks = per_node * nodes;
        let rings = if nodes > 1 { per_node as f64 } else { 1.0 };
        let message = bytes / rounds as f64 / rings;
        let link = |rank: usize| match nodes > 1 && (rank + 1).is_multiple_of(per_node) {
            true => (message / fabric.network.reached(), fabric.network.latency),
            false => (message * rings / fabric.link.reached(), fabric.link.latency),
        };
        let (mut received, mut free) = (vec![0.0_f64; ranks], vec![0.0_f64; ranks]);
        for _ in 0..rounds {
            let mut arrived = vec![0.0; ranks];
            for rank in 0..ranks {
                let (seconds, latency) = link(rank);
                free[rank] = received[rank].max(free[rank]) + seconds;
                arrived[(rank + 1) % ranks] = free[rank] + latency;
            }
            received = arrived;
        }
        received.into_iter().fold(0.0, f64::max)
    }
}
