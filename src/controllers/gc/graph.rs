//! The graph of owners and dependents, as far as watches have shown it. No I/O.

use std::collections::{HashMap, HashSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

pub const FOREGROUND: &str = "foregroundDeletion";
pub const ORPHAN: &str = "orphan";

/// Group and plural name: which collection an object is in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupResource {
    pub group: String,
    pub plural: String,
}

/// An object, or one that is only known because another names it as its owner.
#[derive(Clone, Debug)]
pub struct Node {
    /// None for an owner whose collection we have not seen it in yet.
    pub resource: Option<GroupResource>,
    /// How a dependent names it, while `resource` is none.
    pub named: Option<OwnerReference>,
    pub namespace: String,
    pub name: String,
    pub owners: Vec<OwnerReference>,
    pub dependents: HashSet<String>,
    /// Has a deletion timestamp.
    pub deleting: bool,
    /// Waits, in deletion, for its dependents to go first.
    pub foreground: bool,
}

impl Node {
    /// Known only by name.
    pub fn is_virtual(&self) -> bool {
        self.resource.is_none()
    }
}

/// What a change asks for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Task {
    /// See whether this object (by UID) is to be deleted.
    Examine(String),
    /// Take this owner out of its dependents.
    Orphan(String),
}

/// All objects, by UID.
#[derive(Debug, Default)]
pub struct Graph {
    nodes: HashMap<String, Node>,
}

fn has_finalizer(metadata: &ObjectMeta, finalizer: &str) -> bool {
    metadata.finalizers.iter().flatten().any(|have| have == finalizer)
}

impl Graph {
    pub fn get(&self, uid: &str) -> Option<&Node> {
        self.nodes.get(uid)
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// An object was added or changed.
    pub fn apply(&mut self, resource: &GroupResource, metadata: &ObjectMeta) -> Vec<Task> {
        let Some(uid) = metadata.uid.clone() else { return Vec::new() };
        let mut tasks = Vec::new();
        let owners = metadata.owner_references.clone().unwrap_or_default();
        let deleting = metadata.deletion_timestamp.is_some();
        let old = self.nodes.get(&uid).cloned();
        let was_deleting = old.as_ref().is_some_and(|old| old.deleting);
        let had_orphan_task = was_deleting && old.as_ref().is_some_and(|old| !old.is_virtual());
        let node = Node {
            resource: Some(resource.clone()),
            named: None,
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            owners: owners.clone(),
            dependents: old.as_ref().map(|old| old.dependents.clone()).unwrap_or_default(),
            deleting,
            foreground: deleting && has_finalizer(metadata, FOREGROUND),
        };
        let was_foreground = old.as_ref().is_some_and(|old| old.foreground);
        let before = old.map(|old| old.owners).unwrap_or_default();
        let starts_foreground = node.foreground && !was_foreground;
        let dependents: Vec<String> = node.dependents.iter().cloned().collect();
        self.nodes.insert(uid.clone(), node);
        tasks.extend(self.relink(&uid, &before, &owners, &metadata.namespace));
        if deleting && has_finalizer(metadata, ORPHAN) && !had_orphan_task {
            tasks.push(Task::Orphan(uid.clone()));
        }
        if starts_foreground {
            tasks.extend(dependents.into_iter().map(Task::Examine));
        }
        // Its owners may be gone already: then nothing else will tell us.
        let first = before.is_empty() && !owners.is_empty();
        if starts_foreground || first || before != owners && !owners.is_empty() {
            tasks.push(Task::Examine(uid));
        }
        tasks
    }

    /// Moves a node from its former owners to its present ones.
    fn relink(&mut self, uid: &str, before: &[OwnerReference], after: &[OwnerReference], namespace: &Option<String>) -> Vec<Task> {
        let mut tasks = Vec::new();
        for gone in before.iter().filter(|old| !after.iter().any(|new| new.uid == old.uid)) {
            tasks.extend(self.unlink(uid, &gone.uid));
        }
        for owner in after {
            let was = before.iter().find(|old| old.uid == owner.uid);
            let unblocked = was.is_some_and(|was| was.block_owner_deletion == Some(true) && owner.block_owner_deletion != Some(true));
            let owner_node = self.nodes.entry(owner.uid.clone()).or_insert_with(|| {
                tasks.push(Task::Examine(owner.uid.clone()));
                Node {
                    resource: None,
                    named: Some(owner.clone()),
                    namespace: namespace.clone().unwrap_or_default(),
                    name: owner.name.clone(),
                    owners: Vec::new(),
                    dependents: HashSet::new(),
                    deleting: false,
                    foreground: false,
                }
            });
            owner_node.dependents.insert(uid.to_owned());
            // A new dependent of an owner that waits for its dependents has to go, too; a link that blocks no more may free it.
            if owner_node.foreground {
                tasks.push(Task::Examine(if unblocked { owner.uid.clone() } else { uid.to_owned() }));
            }
        }
        tasks
    }

    /// Takes `uid` from the dependents of `owner`.
    fn unlink(&mut self, uid: &str, owner: &str) -> Option<Task> {
        let node = self.nodes.get_mut(owner)?;
        node.dependents.remove(uid);
        if node.is_virtual() && node.dependents.is_empty() {
            self.nodes.remove(owner);
            return None;
        }
        node.foreground.then(|| Task::Examine(owner.to_owned()))
    }

    /// An object is gone: its dependents have to be looked at, and owners that waited for it.
    pub fn remove(&mut self, uid: &str) -> Vec<Task> {
        let Some(node) = self.nodes.remove(uid) else { return Vec::new() };
        let mut tasks: Vec<Task> = Vec::new();
        for owner in &node.owners {
            tasks.extend(self.unlink(uid, &owner.uid));
        }
        tasks.extend(node.dependents.into_iter().map(Task::Examine));
        tasks
    }

    /// Dependents that hold up the deletion of their owner.
    pub fn blocking(&self, uid: &str) -> Vec<String> {
        let Some(node) = self.nodes.get(uid) else { return Vec::new() };
        let blocks = |dependent: &&String| {
            self.nodes.get(*dependent).is_some_and(|node| node.owners.iter().any(|owner| owner.uid == uid && owner.block_owner_deletion == Some(true)))
        };
        node.dependents.iter().filter(blocks).cloned().collect()
    }
}

/// What an owner is to its dependent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Alive.
    Solid,
    /// Gone.
    Dangling,
    /// Alive, in deletion, waiting for its dependents.
    Waiting,
}

/// What to do with an object, given its owners.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Keep,
    /// Drop the references to these owners (by UID); the others still hold it.
    Unown(Vec<String>),
    /// Delete it, waiting for its own dependents.
    DeleteForeground,
    /// Delete it by the policy that its finalizers ask for.
    Delete,
}

pub fn judge(owners: &[(String, Owner)], has_dependents: bool) -> Verdict {
    let with = |kind: Owner| owners.iter().filter(move |(_, have)| *have == kind).map(|(uid, _)| uid.clone());
    let lost: Vec<String> = with(Owner::Dangling).chain(with(Owner::Waiting)).collect();
    if owners.is_empty() {
        return Verdict::Keep;
    }
    if with(Owner::Solid).next().is_some() {
        return if lost.is_empty() { Verdict::Keep } else { Verdict::Unown(lost) };
    }
    if with(Owner::Waiting).next().is_some() && has_dependents { Verdict::DeleteForeground } else { Verdict::Delete }
}

/// The policy with which an object is deleted, by the finalizers it has.
pub fn policy(metadata: &ObjectMeta) -> &'static str {
    if has_finalizer(metadata, ORPHAN) {
        "Orphan"
    } else if has_finalizer(metadata, FOREGROUND) {
        "Foreground"
    } else {
        "Background"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn apply(graph: &mut Graph, name: &str, owners: &[(&str, bool)], finalizer: Option<&str>) -> Vec<Task> {
        let mut metadata = json!({"name": name, "namespace": "ns", "uid": name, "ownerReferences": owners.iter().map(|(owner, block)| json!({
            "apiVersion": "v1", "kind": "K", "name": owner, "uid": owner, "blockOwnerDeletion": block})).collect::<Vec<_>>()});
        if let Some(finalizer) = finalizer {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            metadata["finalizers"] = json!([finalizer]);
        }
        let resource = GroupResource { group: String::new(), plural: "ks".into() };
        let mut tasks = graph.apply(&resource, &serde_json::from_value(metadata).expect("metadata"));
        tasks.sort();
        tasks.dedup();
        tasks
    }

    fn examine(uids: &[&str]) -> Vec<Task> {
        uids.iter().map(|uid| Task::Examine(uid.to_string())).collect()
    }

    #[test]
    fn dependents_follow_their_owner() {
        let mut graph = Graph::default();
        assert_eq!(apply(&mut graph, "owner", &[], None), []);
        assert_eq!(apply(&mut graph, "a", &[("owner", true)], None), examine(&["a"]));
        assert_eq!(apply(&mut graph, "a", &[("owner", true)], None), [], "nothing new");
        assert_eq!(graph.remove("owner"), examine(&["a"]));
    }

    #[test]
    fn unknown_owners_are_looked_for() {
        let mut graph = Graph::default();
        assert_eq!(apply(&mut graph, "a", &[("lost", false)], None), examine(&["a", "lost"]));
        assert!(graph.get("lost").is_some_and(Node::is_virtual));
        assert_eq!(graph.remove("lost"), examine(&["a"]));
        // when the last dependent of a virtual owner goes, so does the owner
        apply(&mut graph, "b", &[("nowhere", false)], None);
        graph.remove("b");
        assert!(graph.get("nowhere").is_none());
    }

    #[test]
    fn foreground_deletion_waits_for_blocking_dependents() {
        let mut graph = Graph::default();
        apply(&mut graph, "owner", &[], None);
        apply(&mut graph, "a", &[("owner", true)], None);
        apply(&mut graph, "b", &[("owner", false)], None);
        assert_eq!(apply(&mut graph, "owner", &[], Some(FOREGROUND)), examine(&["a", "b", "owner"]));
        assert_eq!(graph.blocking("owner"), ["a"]);
        assert_eq!(graph.remove("a"), examine(&["owner"]));
        assert!(graph.blocking("owner").is_empty());
        // one that comes late goes, too
        assert_eq!(apply(&mut graph, "c", &[("owner", true)], None), examine(&["c"]));
    }

    #[test]
    fn orphaning_is_asked_for_once() {
        let mut graph = Graph::default();
        apply(&mut graph, "owner", &[], None);
        assert_eq!(apply(&mut graph, "owner", &[], Some(ORPHAN)), [Task::Orphan("owner".into())]);
        assert_eq!(apply(&mut graph, "owner", &[], Some(ORPHAN)), []);
    }

    #[test]
    fn verdicts() {
        use Owner::{Dangling, Solid, Waiting};
        for (owners, dependents, expected) in [
            (&[][..], false, Verdict::Keep),
            (&[("s", Solid)], false, Verdict::Keep),
            (&[("s", Solid), ("d", Dangling), ("w", Waiting)], false, Verdict::Unown(vec!["d".into(), "w".into()])),
            (&[("d", Dangling)], true, Verdict::Delete),
            (&[("w", Waiting)], true, Verdict::DeleteForeground),
            (&[("w", Waiting)], false, Verdict::Delete),
        ] {
            let owners: Vec<_> = owners.iter().map(|(uid, kind)| (uid.to_string(), *kind)).collect();
            assert_eq!(judge(&owners, dependents), expected, "{owners:?}");
        }
    }
}
