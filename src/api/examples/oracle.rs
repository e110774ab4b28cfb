use std::collections::BTreeMap;
use serde_json::{Value, json};
use windlass_api::registry::Registry;
use windlass_api::strategy::{Context, Requester, at};

fn main() {
    let path = std::env::args().nth(1).unwrap();
    let filter = std::env::args().nth(2).unwrap_or_default();
    let reg = Registry::builtin();
    let mut stats: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let (mut same, mut n) = (0, 0);
    let user = Requester { name: "admin".into(), uid: "admin".into(), groups: vec!["system:masters".into(), "system:authenticated".into()], extra: Default::default() };
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let c: Value = serde_json::from_str(line).unwrap();
        let code = c["code"].as_u64().unwrap();
        if code != 422 && code != 201 { continue; }
        let mut o = c["object"].clone();
        let av = o["apiVersion"].as_str().unwrap().to_owned();
        let (g, v) = windlass_api::meta::split_api_version(&av);
        let kind = o["kind"].as_str().unwrap_or_default().to_owned();
        if !filter.is_empty() && kind != filter { continue; }
        let Some(r) = reg.find_kind(g, v, &kind) else { continue };
        let ctx = Context { resource: &r, version: v, subresource: None, now: jiff::Timestamp::now(), user: Some(&user) };
        n += 1;
        let ty = ctx.schema().unwrap();
        r.schemas.prune(ty, &mut o);
        r.schemas.normalize(ty, &mut o);
        if r.namespaced && o["metadata"]["namespace"].is_null() { at::set(&mut o, "metadata.namespace", "default".into()); }
        r.strategy.defaults(&ctx, &mut o);
        at::set(&mut o, "metadata.uid", "UID".into());
        r.strategy.prepare_create(&ctx, &mut o);
        let mut got: Vec<(String, String, String)> = r.strategy.validate(&ctx, &o).iter().map(|e| (e.path.clone(), e.kind.reason().to_owned(), e.body())).collect();
        let mut want: Vec<(String, String, String)> = c["causes"].as_array().into_iter().flatten().map(|c| (c["field"].as_str().unwrap_or("").to_owned(), c["reason"].as_str().unwrap_or("").to_owned(), c["message"].as_str().unwrap_or("").to_owned())).collect();
        got.sort(); got.dedup(); want.sort(); want.dedup();
        if got == want {
            if code == 201 { compare_stored(&kind, &o, &c["stored"], &mut stats); }
            same += 1; continue;
        }
        let mut note = |sign: &str, e: &(String, String, String)| {
            let field: String = e.0.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).collect();
            let k = format!("{kind} {sign} {} {} {}", field, e.1, e.2.chars().take(150).collect::<String>());
            let s = stats.entry(k).or_insert_with(|| (0, c["object"].to_string()));
            s.0 += 1;
        };
        for e in &got { if !want.contains(e) { note("extra  ", e); } }
        for e in &want { if !got.contains(e) { note("missing", e); } }
    }
    let limit: usize = std::env::args().nth(3).and_then(|s| s.parse().ok()).unwrap_or(0);
    for (k, (n, ex)) in &stats { println!("{n:4} {k}"); if limit > 0 { println!("        {}", ex.chars().take(limit).collect::<String>()); } }
    println!("same {same} of {n}; {} kinds of differences", stats.len());
}

fn compare_stored(kind: &str, got: &Value, want: &Value, stats: &mut BTreeMap<String, (usize, String)>) {
    let skip = ["metadata.uid", "metadata.creationTimestamp", "metadata.resourceVersion"];
    let mut diffs = Vec::new();
    walk("", got, want, &mut diffs);
    for (p, a, b) in diffs {
        if skip.contains(&p.as_str()) { continue; }
        let field: String = p.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).collect();
        let k = format!("{kind} stored {field}: got {} want {}", short(&a), short(&b));
        stats.entry(k).or_insert((0, String::new())).0 += 1;
    }
}
fn short(v: &Value) -> String { v.to_string().chars().take(120).collect() }
fn walk(p: &str, a: &Value, b: &Value, out: &mut Vec<(String, Value, Value)>) {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            for (k, v) in x { walk(&format!("{p}{}{k}", if p.is_empty() {""} else {"."}), v, y.get(k).unwrap_or(&Value::Null), out); }
            for (k, v) in y { if !x.contains_key(k) { out.push((format!("{p}{}{k}", if p.is_empty() {""} else {"."}), json!(null), v.clone())); } }
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => for (i, (v, w)) in x.iter().zip(y).enumerate() { walk(&format!("{p}[{i}]"), v, w, out); },
        _ => if a != b { out.push((p.to_owned(), a.clone(), b.clone())) }
    }
}
