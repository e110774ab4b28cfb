//! Finds in an object's JSON the few places that the cache needs, without building a tree.
//!
//! The input is JSON that this server (or a restored checkpoint) wrote, so the scanner need not
//! validate, but it must stay in bounds and stop on anything: it returns `None` on bytes it does not understand.

use smallvec::SmallVec;

/// A byte range within an object's JSON; `(0, 0)` is "not there".
pub type Span = (u32, u32);

/// The paths of an object that selectors may ask for, as a tree of keys.
#[derive(Clone, Debug)]
pub struct Paths {
    root: Node,
    len: usize,
}

#[derive(Clone, Debug, Default)]
struct Node {
    leaf: Option<usize>,
    children: Vec<(Box<str>, Node)>,
}

const METADATA: &str = "metadata";
/// Leaf number 0 is always `metadata.labels`.
const LABELS: usize = 0;

impl Paths {
    /// Each path is dotted (`spec.nodeName`); its place in the result is its place here.
    pub fn new<'a>(paths: impl IntoIterator<Item = &'a str>) -> Paths {
        let mut all = Paths { root: Node::default(), len: 1 };
        all.insert("metadata.labels", LABELS);
        for path in paths {
            let leaf = all.len;
            all.insert(path, leaf);
            all.len += 1;
        }
        all
    }

    fn insert(&mut self, path: &str, leaf: usize) {
        let mut node = &mut self.root;
        for key in path.trim_start_matches('.').split('.') {
            let at = match node.children.iter().position(|(k, _)| &**k == key) {
                Some(at) => at,
                None => {
                    node.children.push((key.into(), Node::default()));
                    node.children.len() - 1
                }
            };
            node = &mut node.children[at].1;
        }
        node.leaf.get_or_insert(leaf);
    }
}

/// Where things are in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Just after the `{` of `metadata`.
    pub metadata_start: u32,
    /// `metadata` is `{}`.
    pub metadata_empty: bool,
    pub labels: Span,
    /// One span per path given to [`Paths::new`].
    pub fields: SmallVec<[Span; 2]>,
}

/// Scans one object.
pub fn scan(json: &[u8], paths: &Paths) -> Option<Scan> {
    if json.len() > u32::MAX as usize {
        return None;
    }
    let mut found: SmallVec<[Span; 8]> = SmallVec::from_elem((0, 0), paths.len);
    let mut metadata = None;
    let start = skip_space(json, 0);
    walk(json, start, &paths.root, 0, &mut found, &mut metadata)?;
    let (metadata_start, metadata_empty) = metadata?;
    Some(Scan { metadata_start, metadata_empty, labels: found[LABELS], fields: found[1..].iter().copied().collect() })
}

/// Walks the object at `at` along `node`; returns the index after it.
fn walk(b: &[u8], at: usize, node: &Node, depth: usize, found: &mut [Span], metadata: &mut Option<(u32, bool)>) -> Option<usize> {
    if *b.get(at)? != b'{' {
        return skip_value(b, at);
    }
    let mut i = skip_space(b, at + 1);
    if *b.get(i)? == b'}' {
        return Some(i + 1);
    }
    loop {
        if *b.get(i)? != b'"' {
            return None;
        }
        let key_end = skip_string(b, i)?;
        let key = &b[i + 1..key_end - 1];
        i = skip_space(b, key_end);
        if *b.get(i)? != b':' {
            return None;
        }
        i = skip_space(b, i + 1);
        let child = node.children.iter().find(|(k, _)| k.as_bytes() == key).map(|(_, n)| n);
        let end = match child {
            Some(child) => {
                if depth == 0 && key == METADATA.as_bytes() && *b.get(i)? == b'{' {
                    let empty = *b.get(skip_space(b, i + 1))? == b'}';
                    *metadata = Some((i as u32 + 1, empty));
                }
                let end = if child.children.is_empty() { skip_value(b, i)? } else { walk(b, i, child, depth + 1, found, metadata)? };
                if let Some(leaf) = child.leaf {
                    found[leaf] = (i as u32, end as u32);
                }
                end
            }
            None => skip_value(b, i)?,
        };
        i = skip_space(b, end);
        match *b.get(i)? {
            b',' => i = skip_space(b, i + 1),
            b'}' => return Some(i + 1),
            _ => return None,
        }
    }
}

fn skip_space(b: &[u8], mut i: usize) -> usize {
    while matches!(b.get(i), Some(b' ' | b'\n' | b'\t' | b'\r')) {
        i += 1;
    }
    i
}

/// `at` is the opening quote; returns the index after the closing one.
fn skip_string(b: &[u8], at: usize) -> Option<usize> {
    let mut i = at + 1;
    loop {
        let rest = b.get(i..)?;
        let step = rest.iter().position(|c| *c == b'"' || *c == b'\\')?;
        i += step;
        if b[i] == b'"' {
            return Some(i + 1);
        }
        i += 2;
    }
}

/// The index after the value at `at`.
pub(super) fn skip_value(b: &[u8], at: usize) -> Option<usize> {
    match *b.get(at)? {
        b'"' => skip_string(b, at),
        b'{' | b'[' => {
            let mut depth = 0usize;
            let mut i = at;
            loop {
                match *b.get(i)? {
                    b'"' => {
                        i = skip_string(b, i)?;
                        continue;
                    }
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' => {
                        depth -= 1;
                        if depth == 0 {
                            return Some(i + 1);
                        }
                    }
                    _ => {}
                }
                i += 1;
            }
        }
        _ => {
            let rest = b.get(at..)?;
            let len = rest.iter().position(|c| matches!(c, b',' | b'}' | b']' | b' ' | b'\n' | b'\t' | b'\r')).unwrap_or(rest.len());
            (len > 0).then_some(at + len)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, paths: &[&str], want: Option<(&str, &[&str])>) {
        let got = scan(json.as_bytes(), &Paths::new(paths.iter().copied()));
        let text = |(a, b): Span| &json[a as usize..b as usize];
        let got = got.as_ref().map(|s| (text(s.labels), s.fields.iter().map(|f| text(*f)).collect::<Vec<_>>()));
        assert_eq!(got, want.map(|(l, f)| (l, f.to_vec())), "{json}");
    }

    #[test]
    fn spans() {
        let pod = r#"{"kind":"Pod","metadata":{"annotations":{"x":"\"labels\":{"},"labels":{"a":"b"},"name":"p"},"spec":{"containers":[{"nodeName":"no"}],"nodeName":"n1"},"status":{"phase":"Running"}}"#;
        check(pod, &["spec.nodeName", "status.phase", "status.podIP"], Some((r#"{"a":"b"}"#, &[r#""n1""#, r#""Running""#, ""])));
        check(r#"{ "metadata" : { } , "spec" : { "unschedulable" : true } }"#, &["spec.unschedulable"], Some(("", &["true"])));
        check(r#"{"metadata":{"name":"x"},"type":"Opaque"}"#, &["type"], Some(("", &[r#""Opaque""#])));
        check(r#"{"metadata":{"labels":null},"spec":"odd"}"#, &["spec.nodeName"], Some(("null", &[""])));
        for broken in ["", "{", "[]", r#"{"metadata""#, r#"{"metadata":{"a":"#, r#"{"a":"\"#, r#"{"metadata":{"a":1"#, "\"\\"] {
            check(broken, &[], None);
        }
    }
}
