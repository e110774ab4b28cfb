use super::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use windlass_api::registry::Registry;
use windlass_api::selector::{FieldSelector, LabelSelector};

fn cache() -> ResourceCache {
    let pods = Registry::builtin().find_resource("", "pods").expect("a built-in resource");
    ResourceCache::new(pods, 1)
}

fn pod(cache: &ResourceCache, key: &str, node: &str, revision: u64) -> Stored {
    let name = key.rsplit('/').next().unwrap_or_default();
    let raw = json!({"metadata": {"name": name, "labels": {"node": node}}, "spec": {"nodeName": node}}).to_string();
    Stored::new(key, raw.as_bytes(), revision, cache.paths_ref()).expect("a pod")
}

fn filter(cache: &ResourceCache, namespace: &str, labels: &str, fields: &str) -> Filter {
    let resource = cache.resource.read().clone();
    let (labels, fields) = (LabelSelector::parse(labels).expect("labels"), FieldSelector::parse(fields).expect("fields"));
    Filter::new(&resource, cache.fields(), Some(namespace), labels, &fields)
}

fn told(subscription: &mut Subscription) -> Vec<String> {
    let mut all: Vec<Delivery> = std::mem::take(&mut subscription.backlog);
    while let Ok(delivery) = subscription.queue.try_recv() {
        all.push(delivery);
    }
    all.iter().map(|d| format!("{} {}", d.change.as_str(), d.event.object.key())).collect()
}

#[test]
fn a_change_reaches_whom_it_concerns() {
    let cache = cache();
    let watch = |ns: &str, labels: &str, fields: &str| cache.watch(filter(&cache, ns, labels, fields), None, false).expect("a watch").1;
    let mut all = watch("", "", "");
    let mut one = watch("", "", "spec.nodeName=n1");
    let mut two = watch("", "", "spec.nodeName=n2");
    let mut unbound = watch("", "", "spec.nodeName=");
    let mut space = watch("a", "", "");
    let mut label = watch("", "node=n2", "");
    let mut named = watch("a", "", "metadata.name=p");
    cache.apply(2, "a/p", Some(pod(&cache, "a/p", "", 2)));
    cache.apply(3, "a/p", Some(pod(&cache, "a/p", "n1", 3)));
    cache.apply(4, "b/q", Some(pod(&cache, "b/q", "n2", 4)));
    cache.apply(5, "a/p", Some(pod(&cache, "a/p", "n2", 5)));
    cache.apply(6, "a/p", None);
    cache.apply(7, "a/p", None);
    assert_eq!(told(&mut all), ["ADDED a/p", "MODIFIED a/p", "ADDED b/q", "MODIFIED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut one), ["ADDED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut two), ["ADDED b/q", "ADDED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut unbound), ["ADDED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut space), ["ADDED a/p", "MODIFIED a/p", "MODIFIED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut label), ["ADDED b/q", "ADDED a/p", "DELETED a/p"]);
    assert_eq!(told(&mut named), ["ADDED a/p", "MODIFIED a/p", "MODIFIED a/p", "DELETED a/p"]);
    // From a revision on: what came after it, and nothing twice.
    let mut late = cache.watch(filter(&cache, "", "", ""), Some(4), false).expect("a watch").1;
    assert_eq!(told(&mut late), ["MODIFIED a/p", "DELETED a/p"]);
    assert_eq!(cache.watch(filter(&cache, "", "", ""), Some(0), false).err(), Some(TooOld { requested: 0, oldest: 1 }));
}

#[test]
fn a_slow_watcher_is_cut_off() {
    let cache = cache();
    let slow = cache.watch(filter(&cache, "", "", ""), None, false).expect("a watch").1;
    let mut quick = cache.watch(filter(&cache, "", "", ""), None, false).expect("a watch").1;
    for revision in 2..(watchers::QUEUE as u64 + 10) {
        cache.apply(revision, "a/p", Some(pod(&cache, "a/p", "n", revision)));
        told(&mut quick);
    }
    assert!(slow.was_cut());
    assert!(!quick.was_cut());
    assert_eq!(cache.watchers(), 1);
}

/// Whatever happened since, a page shows the moment that was asked for.
#[test]
fn pages_of_the_past() {
    let mut rng = StdRng::seed_from_u64(3);
    let cache = cache();
    let mut moments: Vec<(u64, Vec<(String, u64)>)> = Vec::new();
    for revision in 2..400 {
        let key = format!("{}/p{:02}", ["a", "b"][rng.random_range(0..2)], rng.random_range(0..30));
        let object = rng.random_bool(0.7).then(|| pod(&cache, &key, "n", revision));
        cache.apply(revision, &key, object);
        let now = cache.all(None).iter().map(|o| (o.key().to_string(), o.revision)).collect();
        moments.push((revision, now));
    }
    for (revision, want) in &moments {
        for (namespace, limit) in [("", None), ("a", None), ("", Some(7)), ("b", Some(3))] {
            let filter = filter(&cache, namespace, "", "");
            let (mut got, mut after): (Vec<(String, u64)>, Option<Arc<str>>) = (Vec::new(), None);
            loop {
                let page = cache.page_at(*revision, &filter, after.as_deref(), limit).expect("within the ring");
                got.extend(page.items.iter().map(|o| (o.key().to_string(), o.revision)));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            let want: Vec<_> = want.iter().filter(|(k, _)| namespace.is_empty() || k.starts_with(&format!("{namespace}/"))).cloned().collect();
            assert_eq!(got, want, "@{revision} {namespace:?} {limit:?}");
        }
    }
}
