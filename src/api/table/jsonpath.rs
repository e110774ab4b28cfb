//! The part of kubectl's JSONPath that printer columns use: fields, quoted fields, indexes, slices, wildcards, unions of
//! indexes, recursive descent and filters that compare with a literal.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Wildcard,
    Descend,
    /// start, end, step; absent bounds are the list's.
    Slice(Option<i64>, Option<i64>, i64),
    Index(i64),
    Filter { path: Vec<Step>, op: Op, literal: Value },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Exists,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// A parsed path.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonPath(Vec<Step>);

impl JsonPath {
    /// Parses `.spec.replicas`, `.status.conditions[?(@.type=="Ready")].status`, with or without braces; `None` when it
    /// is none or uses what is not supported.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).unwrap_or(text);
        let text = text.strip_prefix('$').or_else(|| text.strip_prefix('@')).unwrap_or(text);
        let mut rest = text;
        let steps = steps(&mut rest)?;
        rest.is_empty().then_some(Self(steps))
    }

    /// The first value that the path finds.
    pub fn first<'v>(&self, object: &'v Value) -> Option<&'v Value> {
        find(&self.0, object).into_iter().next()
    }

    /// All values that the path finds, in order.
    pub fn all<'v>(&self, object: &'v Value) -> Vec<&'v Value> {
        find(&self.0, object)
    }
}

fn steps(rest: &mut &str) -> Option<Vec<Step>> {
    let mut out = Vec::new();
    loop {
        if let Some(r) = rest.strip_prefix("..") {
            *rest = r;
            out.push(Step::Descend);
            if !r.starts_with('[') {
                out.push(name(rest)?);
            }
        } else if let Some(r) = rest.strip_prefix('.') {
            *rest = r;
            if r.is_empty() || r.starts_with('[') {
                continue;
            }
            out.push(name(rest)?);
        } else if rest.starts_with('[') {
            let end = closing(rest)?;
            out.push(bracket(&rest[1..end])?);
            *rest = &rest[end + 1..];
        } else {
            return Some(out);
        }
    }
}

fn name(rest: &mut &str) -> Option<Step> {
    let mut out = String::new();
    let mut chars = rest.char_indices();
    let mut end = rest.len();
    while let Some((i, c)) = chars.next() {
        match c {
            '\\' => out.extend(chars.next().map(|(_, c)| c)),
            '.' | '[' | ' ' | ')' | '=' | '!' | '<' | '>' => {
                end = i;
                break;
            }
            c => out.push(c),
        }
    }
    *rest = &rest[end..];
    match out.as_str() {
        "" => None,
        "*" => Some(Step::Wildcard),
        _ => Some(Step::Field(out)),
    }
}

/// Where the bracket at the start is closed, quotes and inner brackets counted.
fn closing(s: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0usize, None);
    for (i, c) in s.char_indices() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') => {
                depth -= 1;
                if depth == 0 {
                    return Some(i);
                }
            }
            _ => {}
        }
    }
    None
}

fn bracket(inner: &str) -> Option<Step> {
    let inner = inner.trim();
    if inner == "*" {
        return Some(Step::Wildcard);
    }
    if let Some(quoted) = unquote(inner) {
        return Some(Step::Field(quoted.to_owned()));
    }
    if let Some(filter) = inner.strip_prefix("?(").and_then(|f| f.strip_suffix(')')) {
        return parse_filter(filter);
    }
    if inner.contains(':') {
        let mut parts = inner.split(':').map(|p| if p.is_empty() { Some(None) } else { p.parse().ok().map(Some) });
        let (start, end) = (parts.next()??, parts.next()??);
        let step = parts.next().unwrap_or(Some(None))?.unwrap_or(1);
        return (step > 0 && parts.next().is_none()).then_some(Step::Slice(start, end, step));
    }
    inner.parse().ok().map(Step::Index)
}

fn unquote(s: &str) -> Option<&str> {
    let strip = |q: char| s.strip_prefix(q).and_then(|s| s.strip_suffix(q)).filter(|s| !s.contains(q));
    strip('\'').or_else(|| strip('"'))
}

fn parse_filter(text: &str) -> Option<Step> {
    let mut rest = text.trim().strip_prefix('@')?;
    let path = steps(&mut rest)?;
    let rest = rest.trim();
    if rest.is_empty() {
        return Some(Step::Filter { path, op: Op::Exists, literal: Value::Null });
    }
    const OPS: [(&str, Op); 6] =
        [("==", Op::Eq), ("!=", Op::Ne), ("<=", Op::Le), (">=", Op::Ge), ("<", Op::Lt), (">", Op::Gt)];
    let (op, right) = OPS.iter().find_map(|(s, op)| rest.strip_prefix(s).map(|r| (*op, r.trim())))?;
    let literal = match unquote(right) {
        Some(s) => Value::from(s),
        None => serde_json::from_str(right).ok()?,
    };
    Some(Step::Filter { path, op, literal })
}

fn find<'v>(steps: &[Step], object: &'v Value) -> Vec<&'v Value> {
    let mut found = vec![object];
    for step in steps {
        found = found.into_iter().flat_map(|v| apply(step, v)).collect();
    }
    found
}

fn children(v: &Value) -> Vec<&Value> {
    match v {
        Value::Array(l) => l.iter().collect(),
        Value::Object(m) => m.values().collect(),
        _ => Vec::new(),
    }
}

fn apply<'v>(step: &Step, v: &'v Value) -> Vec<&'v Value> {
    match step {
        Step::Field(name) => v.get(name).into_iter().collect(),
        Step::Wildcard => children(v),
        Step::Descend => {
            let mut out = vec![v];
            let mut next = 0;
            while let Some(v) = out.get(next).copied() {
                out.extend(children(v));
                next += 1;
            }
            out
        }
        Step::Index(i) => {
            let list = v.as_array().map_or(&[][..], Vec::as_slice);
            let at = if *i < 0 { list.len() as i64 + i } else { *i };
            usize::try_from(at).ok().and_then(|i| list.get(i)).into_iter().collect()
        }
        Step::Slice(start, end, step) => {
            let list = v.as_array().map_or(&[][..], Vec::as_slice);
            let len = list.len() as i64;
            let bound = |b: i64| (if b < 0 { b + len } else { b }).clamp(0, len) as usize;
            let (from, to) = (bound(start.unwrap_or(0)), bound(end.unwrap_or(len)));
            let step = usize::try_from(*step).unwrap_or(1);
            list.get(from..to).unwrap_or_default().iter().step_by(step).collect()
        }
        Step::Filter { path, op, literal } => {
            let list = v.as_array().map_or(&[][..], Vec::as_slice);
            list.iter().filter(|item| find(path, item).first().is_some_and(|f| holds(f, *op, literal))).collect()
        }
    }
}

fn holds(v: &Value, op: Op, literal: &Value) -> bool {
    let order = match (v, literal) {
        (Value::String(a), Value::String(b)) => Some(a.as_str().cmp(b)),
        (Value::Bool(a), Value::Bool(b)) => Some(a.cmp(b)),
        (a, b) => a.as_f64().zip(b.as_f64()).and_then(|(a, b)| a.partial_cmp(&b)),
    };
    match op {
        Op::Exists => true,
        Op::Eq => v == literal || order.is_some_and(|o| o.is_eq()),
        Op::Ne => v != literal && order.is_none_or(|o| o.is_ne()),
        Op::Lt => order.is_some_and(|o| o.is_lt()),
        Op::Le => order.is_some_and(|o| o.is_le()),
        Op::Gt => order.is_some_and(|o| o.is_gt()),
        Op::Ge => order.is_some_and(|o| o.is_ge()),
    }
}
