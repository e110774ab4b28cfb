//! What happens in the cluster that may make a waiting pod fit.

use std::ops::{BitOr, BitOrAssign};

/// A set of kinds of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events(u16);

impl Events {
    pub const NONE: Self = Self(0);
    pub const NODE_ADD: Self = Self(1);
    /// Labels, taints, allocatable resources or the cordon of a node changed.
    pub const NODE_UPDATE: Self = Self(1 << 1);
    /// A pod came to a node.
    pub const POD_PLACED: Self = Self(1 << 2);
    /// A pod left its node.
    pub const POD_GONE: Self = Self(1 << 3);
    /// The waiting pod itself, or labels of a placed pod, changed.
    pub const POD_UPDATE: Self = Self(1 << 4);
    pub const CLAIM: Self = Self(1 << 5);
    pub const VOLUME: Self = Self(1 << 6);
    pub const STORAGE_CLASS: Self = Self(1 << 7);
    pub const CSI_NODE: Self = Self(1 << 8);
    pub const NAMESPACE: Self = Self(1 << 9);

    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The name under which metrics count one kind.
    pub fn label(self) -> &'static str {
        match self {
            Self::NODE_ADD => "NodeAdd",
            Self::NODE_UPDATE => "NodeUpdate",
            Self::POD_PLACED => "AssignedPodAdd",
            Self::POD_GONE => "AssignedPodDelete",
            Self::POD_UPDATE => "PodUpdate",
            Self::CLAIM => "PvcAdd",
            Self::VOLUME => "PvAdd",
            Self::STORAGE_CLASS => "StorageClassAdd",
            Self::CSI_NODE => "CSINodeAdd",
            Self::NAMESPACE => "NamespaceUpdate",
            _ => "Multiple",
        }
    }
}

impl BitOr for Events {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Events {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
