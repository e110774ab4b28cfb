//! Profiles: which plugins decide for which scheduler name, and how much each score counts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plugin::{self, Plugin};

pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// A profile as configured.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct ProfileConfig {
    /// Pods name their scheduler by `spec.schedulerName`.
    pub scheduler_name: String,
    /// Plugins that are not asked.
    pub disabled: Vec<String>,
    /// Weights of scores that differ from the default profile's.
    pub weights: BTreeMap<String, i64>,
    /// Share of nodes, in percent, that are rated of those that fit; 0 adapts it to the size of the cluster.
    pub percentage_of_nodes_to_score: u8,
    /// Whether pods may be evicted for one of higher priority.
    pub preemption: bool,
}

impl Default for ProfileConfig {
    fn default() -> Self {
        Self {
            scheduler_name: DEFAULT_SCHEDULER.to_owned(),
            disabled: Vec::new(),
            weights: BTreeMap::new(),
            percentage_of_nodes_to_score: 0,
            preemption: true,
        }
    }
}

/// A plugin in a profile. Its place in the profile is its number, as in a [`Rejectors`] set.
#[derive(Clone, Copy)]
pub struct Entry {
    pub plugin: &'static dyn Plugin,
    /// 0: it only filters.
    pub weight: i64,
}

pub struct Profile {
    pub entries: Vec<Entry>,
    pub percentage_of_nodes_to_score: u8,
    pub preemption: bool,
}

impl Profile {
    /// Refuses plugins that do not exist and weights out of 0..=100.
    pub fn new(config: &ProfileConfig) -> Result<Self, String> {
        let names = || plugin::ALL.iter().map(|row| row.plugin.name());
        for name in config.disabled.iter().chain(config.weights.keys()) {
            if !names().any(|known| known == name) {
                return Err(format!("profile {:?}: no plugin is called {name:?}; there are {}", config.scheduler_name, names().collect::<Vec<_>>().join(", ")));
            }
        }
        if let Some((name, weight)) = config.weights.iter().find(|(_, weight)| !(0..=100).contains(*weight)) {
            return Err(format!("profile {:?}: the weight {weight} of {name} is not within 0 and 100", config.scheduler_name));
        }
        let enabled = plugin::ALL.iter().filter(|row| !config.disabled.iter().any(|name| name == row.plugin.name()));
        let entry = |row: &plugin::Row| Entry { plugin: row.plugin, weight: config.weights.get(row.plugin.name()).copied().unwrap_or(row.weight) };
        Ok(Self {
            entries: enabled.map(entry).collect(),
            percentage_of_nodes_to_score: config.percentage_of_nodes_to_score.min(100),
            preemption: config.preemption,
        })
    }

    /// How many fit nodes are enough, of `nodes`. As upstream: all of up to 100; then half, falling to 5 % in the
    /// largest clusters.
    pub fn enough(&self, nodes: usize) -> usize {
        const MIN: usize = 100;
        if nodes <= MIN || self.percentage_of_nodes_to_score == 100 {
            return nodes;
        }
        let percentage = match self.percentage_of_nodes_to_score {
            0 => 50usize.saturating_sub(nodes / 125).max(5),
            given => usize::from(given),
        };
        (nodes * percentage / 100).max(MIN)
    }
}

/// A set of plugins of a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejectors(u32);

impl Rejectors {
    pub fn insert(&mut self, entry: usize) {
        self.0 |= 1 << entry;
    }

    pub fn contains(self, entry: usize) -> bool {
        self.0 & (1 << entry) != 0
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_nodes_are_enough() {
        // From upstream's numFeasibleNodesToFind.
        for (percentage, nodes, expected) in [(0, 10, 10), (40, 10, 10), (0, 1000, 420), (40, 1000, 400), (0, 6000, 300), (40, 6000, 2400), (100, 6000, 6000)] {
            let profile = Profile::new(&ProfileConfig { percentage_of_nodes_to_score: percentage, ..ProfileConfig::default() }).unwrap();
            assert_eq!(profile.enough(nodes), expected, "{percentage} % of {nodes}");
        }
    }

    #[test]
    fn unknown_plugins_and_weights_are_refused() {
        let with = |name: &str, weight| ProfileConfig { weights: BTreeMap::from([(name.to_owned(), weight)]), ..ProfileConfig::default() };
        assert!(Profile::new(&with("ImageLocality", 5)).is_ok());
        assert!(Profile::new(&with("ImageLocalitty", 5)).err().unwrap().contains("no plugin is called"));
        assert!(Profile::new(&with("ImageLocality", -1)).err().unwrap().contains("not within 0 and 100"));
    }
}
