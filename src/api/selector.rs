//! Label selectors and field selectors: parsing in upstream's grammar and matching.
//!
//! Follows `k8s.io/apimachinery/pkg/labels`, `pkg/fields` and `metav1.LabelSelector`.

use std::fmt;

use serde_json::Value;

use crate::content;
use crate::field::quote;
use crate::registry::Resource;

/// How a label requirement compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// The label exists and its value is among the values (`=`, `==`, `in`).
    In,
    /// The label is absent or its value is not among the values (`!=`, `notin`).
    NotIn,
    /// The label exists.
    Exists,
    /// The label is absent.
    DoesNotExist,
    /// The label is an integer above the one value.
    GreaterThan,
    /// The label is an integer below the one value.
    LessThan,
}

/// One condition on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The label's key.
    pub key: String,
    /// How it compares.
    pub operator: Operator,
    /// What it is compared with, sorted, without duplicates.
    pub values: Vec<String>,
}

/// Conditions that all must hold. The empty selector matches everything; [`LabelSelector::nothing`] nothing.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct LabelSelector {
    requirements: Vec<Requirement>,
    nothing: bool,
}

// === impl Requirement ===

impl Requirement {
    /// Checks key, number of values and values as upstream's `labels.NewRequirement`.
    pub fn new(key: &str, operator: Operator, mut values: Vec<String>) -> Result<Self, String> {
        let mut errors = Vec::new();
        invalid(&mut errors, "key", key, content::qualified_name(key));
        let go_values = || format!("[{}]", values.iter().map(|value| quote(value)).collect::<Vec<_>>().join(","));
        match operator {
            Operator::In | Operator::NotIn if values.is_empty() => errors.push(format!(
                "values: Invalid value: {}: for 'in', 'notin' operators, values set can't be empty",
                go_values()
            )),
            Operator::Exists | Operator::DoesNotExist if !values.is_empty() => errors.push(format!(
                "values: Invalid value: {}: values set must be empty for exists and does not exist",
                go_values()
            )),
            Operator::GreaterThan | Operator::LessThan => {
                if values.len() != 1 {
                    errors.push(format!(
                        "values: Invalid value: {}: for 'Gt', 'Lt' operators, exactly one value is required",
                        go_values()
                    ));
                }
                for (index, value) in values.iter().enumerate().filter(|(_, value)| value.parse::<i64>().is_err()) {
                    errors.push(format!(
                        "values[{index}]: Invalid value: {}: for 'Gt', 'Lt' operators, the value must be an integer",
                        quote(value)
                    ));
                }
            }
            _ => {}
        }
        for (index, value) in values.iter().enumerate() {
            invalid(&mut errors, &format!("values[{index}][{key}]"), value, content::label_value(value));
        }
        match errors.len() {
            0 => {
                values.sort();
                values.dedup();
                Ok(Requirement { key: key.to_owned(), operator, values })
            }
            1 => Err(errors.remove(0)),
            _ => Err(format!("[{}]", errors.join(", "))),
        }
    }

    /// Whether a label with this value (`None`: absent) meets the requirement.
    pub fn matches(&self, value: Option<&str>) -> bool {
        let among = |value: &str| self.values.iter().any(|candidate| candidate == value);
        match (self.operator, value) {
            (Operator::In, value) => value.is_some_and(among),
            (Operator::NotIn, value) => !value.is_some_and(among),
            (Operator::Exists, value) => value.is_some(),
            (Operator::DoesNotExist, value) => value.is_none(),
            (Operator::GreaterThan | Operator::LessThan, None) => false,
            (Operator::GreaterThan | Operator::LessThan, Some(value)) => {
                let bound = self.values.first().and_then(|bound| bound.parse::<i64>().ok());
                match (value.parse::<i64>(), bound) {
                    (Ok(value), Some(bound)) if self.operator == Operator::GreaterThan => value > bound,
                    (Ok(value), Some(bound)) => value < bound,
                    _ => false,
                }
            }
        }
    }
}

fn invalid(errors: &mut Vec<String>, path: &str, value: &str, broken: Vec<String>) {
    if !broken.is_empty() {
        errors.push(format!("{path}: Invalid value: {}: {}", quote(value), broken.join("; ")));
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values.join(",");
        match self.operator {
            Operator::In if self.values.len() == 1 => write!(f, "{}={values}", self.key),
            Operator::NotIn if self.values.len() == 1 => write!(f, "{}!={values}", self.key),
            Operator::In => write!(f, "{} in ({values})", self.key),
            Operator::NotIn => write!(f, "{} notin ({values})", self.key),
            Operator::Exists => f.write_str(&self.key),
            Operator::DoesNotExist => write!(f, "!{}", self.key),
            Operator::GreaterThan => write!(f, "{}>{values}", self.key),
            Operator::LessThan => write!(f, "{}<{values}", self.key),
        }
    }
}

// === impl LabelSelector ===

impl LabelSelector {
    /// The selector that matches no object.
    pub fn nothing() -> Self {
        LabelSelector { requirements: Vec::new(), nothing: true }
    }

    /// A selector of ready requirements.
    pub fn from_requirements(mut requirements: Vec<Requirement>) -> Self {
        requirements.sort_by(|a, b| a.key.cmp(&b.key));
        LabelSelector { requirements, nothing: false }
    }

    /// Parses the text form: `a=b,c!=d,e in (f,g),h notin (i),j,!k,l>1`.
    pub fn parse(text: &str) -> Result<Self, String> {
        Parser { tokens: lex(text), position: 0 }.parse().map(Self::from_requirements)
    }

    /// Reads a `metav1.LabelSelector` object; null and absent match nothing, `{}` everything.
    pub fn from_object(object: &Value) -> Result<Self, String> {
        if object.is_null() {
            return Ok(Self::nothing());
        }
        let mut requirements = Vec::new();
        for (key, value) in object["matchLabels"].as_object().into_iter().flatten() {
            let value = value.as_str().unwrap_or_default().to_owned();
            requirements.push(Requirement::new(key, Operator::In, vec![value])?);
        }
        for expression in object["matchExpressions"].as_array().into_iter().flatten() {
            let operator = match expression["operator"].as_str().unwrap_or_default() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => return Err(format!("{} is not a valid label selector operator", quote(other))),
            };
            let values = expression["values"].as_array().into_iter().flatten();
            let values = values.filter_map(Value::as_str).map(str::to_owned).collect();
            requirements.push(Requirement::new(expression["key"].as_str().unwrap_or_default(), operator, values)?);
        }
        Ok(Self::from_requirements(requirements))
    }

    /// Reads a plain map of labels (`spec.selector` of a Service or ReplicationController). Not validated,
    /// as upstream's `SelectorFromSet`; an empty map matches everything.
    pub fn from_map(map: &Value) -> Self {
        let requirements = map.as_object().into_iter().flatten().map(|(key, value)| Requirement {
            key: key.clone(),
            operator: Operator::In,
            values: vec![value.as_str().unwrap_or_default().to_owned()],
        });
        Self::from_requirements(requirements.collect())
    }

    /// Whether labels, looked up by `get`, match.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.nothing && self.requirements.iter().all(|requirement| requirement.matches(get(&requirement.key)))
    }

    /// Whether an object's `metadata.labels` match.
    pub fn matches_object(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.matches(|key| labels.get(key).and_then(Value::as_str))
    }

    /// Whether it matches everything.
    pub fn is_empty(&self) -> bool {
        !self.nothing && self.requirements.is_empty()
    }

    /// Whether it matches nothing at all.
    pub fn is_nothing(&self) -> bool {
        self.nothing
    }

    /// The conditions, sorted by key.
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.requirements.iter().enumerate() {
            write!(f, "{}{requirement}", if index > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

// === The text form ===

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token<'a> {
    End,
    Identifier(&'a str),
    Symbol(&'a str),
    /// Special characters that form no symbol.
    Bad(&'a str),
}

impl<'a> Token<'a> {
    fn text(self) -> &'a str {
        match self {
            Token::End => "",
            Token::Identifier(text) | Token::Symbol(text) | Token::Bad(text) => text,
        }
    }
}

fn lex(text: &str) -> Vec<Token<'_>> {
    let special = |c: char| "=!(),<>".contains(c);
    let blank = |c: char| " \t\r\n".contains(c);
    let mut tokens = Vec::new();
    let mut rest = text.trim_start_matches(blank);
    while let Some(first) = rest.chars().next() {
        let length = if special(first) {
            ["==", "!="].into_iter().find(|symbol| rest.starts_with(symbol)).map_or(1, str::len)
        } else {
            rest.find(|c| special(c) || blank(c)).unwrap_or(rest.len())
        };
        let (token, tail) = rest.split_at(length);
        tokens.push(match token {
            "!" | "=" | "==" | "!=" | "(" | ")" | "," | "<" | ">" => Token::Symbol(token),
            token if special(first) => Token::Bad(token),
            token => Token::Identifier(token),
        });
        rest = tail.trim_start_matches(blank);
    }
    tokens.push(Token::End);
    tokens
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    position: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens.get(self.position).copied().unwrap_or(Token::End)
    }

    fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        self.position += 1;
        token
    }

    fn parse(mut self) -> Result<Vec<Requirement>, String> {
        let mut requirements = Vec::new();
        loop {
            match self.peek() {
                Token::End => return Ok(requirements),
                Token::Identifier(_) | Token::Symbol("!") => {}
                token => return Err(format!("found '{}', expected: !, identifier, or 'end of string'", token.text())),
            }
            let requirement = self.requirement().map_err(|error| format!("unable to parse requirement: {error}"))?;
            requirements.push(requirement);
            match self.next() {
                Token::End => return Ok(requirements),
                Token::Symbol(",") => match self.peek() {
                    Token::Identifier(_) | Token::Symbol("!") => {}
                    token => return Err(format!("found '{}', expected: identifier after ','", token.text())),
                },
                token => return Err(format!("found '{}', expected: ',' or 'end of string'", token.text())),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let negated = self.peek() == Token::Symbol("!");
        if negated {
            self.next();
        }
        let key = match self.next() {
            Token::Identifier(key) => key,
            token => return Err(format!("found '{}', expected: identifier", token.text())),
        };
        let mut errors = Vec::new();
        invalid(&mut errors, "key", key, content::qualified_name(key));
        if let Some(error) = errors.pop() {
            // Upstream reports the key with an empty path here.
            return Err(error.replacen("key: ", "<nil>: ", 1));
        }
        if negated {
            return Requirement::new(key, Operator::DoesNotExist, Vec::new());
        }
        if matches!(self.peek(), Token::End | Token::Symbol(",")) {
            return Requirement::new(key, Operator::Exists, Vec::new());
        }
        let operator = match self.next() {
            Token::Identifier("in") => return Requirement::new(key, Operator::In, self.set()?),
            Token::Identifier("notin") => return Requirement::new(key, Operator::NotIn, self.set()?),
            Token::Symbol("=" | "==") => Operator::In,
            Token::Symbol("!=") => Operator::NotIn,
            Token::Symbol(">") => Operator::GreaterThan,
            Token::Symbol("<") => Operator::LessThan,
            token => {
                return Err(format!("found '{}', expected: in, notin, =, ==, !=, gt, lt", token.text()));
            }
        };
        let value = match self.peek() {
            Token::End | Token::Symbol(",") => "",
            Token::Identifier(value) => {
                self.next();
                value
            }
            token => return Err(format!("found '{}', expected: identifier", token.text())),
        };
        Requirement::new(key, operator, vec![value.to_owned()])
    }

    /// `(a,b,)`: values between parentheses; an empty place is the empty value.
    fn set(&mut self) -> Result<Vec<String>, String> {
        match self.next() {
            Token::Symbol("(") => {}
            token => return Err(format!("found '{}' expected: '('", token.text())),
        }
        let mut values = Vec::new();
        loop {
            let value = match self.peek() {
                Token::Identifier(value) => {
                    self.next();
                    value
                }
                Token::Symbol("," | ")") => "",
                token => return Err(format!("found '{}', expected: ',', ')' or identifier", token.text())),
            };
            values.push(value.to_owned());
            match self.next() {
                Token::Symbol(",") => {}
                Token::Symbol(")") => return Ok(values),
                token => return Err(format!("found '{}', expected: ',' or ')'", token.text())),
            }
        }
    }
}

// === Field selectors ===

/// One condition on one field of [`Resource`]'s selectable fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRequirement {
    /// The field's name, `metadata.name`.
    pub path: String,
    /// `!=` instead of `=`.
    pub negated: bool,
    /// The text it is compared with.
    pub value: String,
}

/// Conditions on fields that all must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct FieldSelector {
    requirements: Vec<FieldRequirement>,
}

impl FieldSelector {
    /// Parses `a=b,c!=d,e==f`; backslash escapes `\`, `,` and `=` in values.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for term in split_terms(text) {
            if term.is_empty() {
                continue;
            }
            let operator = term.char_indices().find_map(|(index, _)| {
                ["!=", "==", "="].into_iter().find(|operator| term[index..].starts_with(operator)).map(|o| (index, o))
            });
            let Some((index, operator)) = operator else {
                return Err(format!("invalid selector: '{text}'; can't understand '{term}'"));
            };
            requirements.push(FieldRequirement {
                path: term[..index].to_owned(),
                negated: operator == "!=",
                value: unescape(&term[index + operator.len()..])?,
            });
        }
        Ok(FieldSelector { requirements })
    }

    /// The conditions in the order they were written.
    pub fn requirements(&self) -> &[FieldRequirement] {
        &self.requirements
    }

    /// Whether it matches everything.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// The value that `path` must have, when the selector asks for exactly one.
    pub fn exact(&self, path: &str) -> Option<&str> {
        let mut found = self.requirements.iter().filter(|requirement| requirement.path == path && !requirement.negated);
        found.next().map(|requirement| requirement.value.as_str())
    }

    /// Refuses fields that the resource cannot be selected by, in upstream's words.
    pub fn check(&self, resource: &Resource, version: &str) -> Result<(), String> {
        for requirement in &self.requirements {
            if resource.selectable(version, &requirement.path).is_none() {
                return Err(resource.unselectable(version, &requirement.path));
            }
        }
        Ok(())
    }

    /// Whether an object of `resource` matches. A field that cannot be selected by matches nothing; ask [`Self::check`] first.
    pub fn matches_object(&self, resource: &Resource, object: &Value) -> bool {
        let version = crate::meta::split_api_version(crate::meta::api_version(object)).1;
        self.requirements.iter().all(|requirement| match resource.selectable(version, &requirement.path) {
            Some(field) => (field.text(object) == requirement.value) != requirement.negated,
            None => false,
        })
    }
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.requirements.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let operator = if requirement.negated { "!=" } else { "=" };
            let value = requirement.value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
            write!(f, "{comma}{}{operator}{value}", requirement.path)?;
        }
        Ok(())
    }
}

fn split_terms(text: &str) -> Vec<&str> {
    let (mut terms, mut start, mut escaped) = (Vec::new(), 0, false);
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b',' => {
                terms.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    terms
}

fn unescape(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next() {
                Some(escaped @ ('\\' | ',' | '=')) => plain.push(escaped),
                Some(other) => return Err(format!("invalid field selector: invalid escape sequence: \\{other}")),
                None => return Err("invalid field selector: invalid escape sequence: \\".to_owned()),
            },
            ',' | '=' => {
                let code = u32::from(character);
                return Err(format!("invalid field selector: unescaped character in value: {code}"));
            }
            character => plain.push(character),
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(text: &str, labels: Value, expected: bool) {
        let selector = LabelSelector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(selector.matches_object(&json!({"metadata": {"labels": labels}})), expected, "{text}");
    }

    #[test]
    fn label_matching() {
        check("", json!({}), true);
        check("a=b", json!({"a": "b"}), true);
        check("a==b, c != d", json!({"a": "b", "c": "e"}), true);
        check("a!=b", json!({}), true);
        check("a in (b,c)", json!({"a": "c"}), true);
        check("a in (b,c)", json!({}), false);
        check("a notin (b,c)", json!({}), true);
        check("x in (foo,,baz),y,z notin ()", json!({"x": "", "y": "1", "z": "2"}), true);
        check("a", json!({"a": ""}), true);
        check("!a", json!({"a": ""}), false);
        check("a>1,a<3", json!({"a": "2"}), true);
        check("a>1", json!({"a": "x"}), false);
        check("a=", json!({"a": ""}), true);
        check("in in (in)", json!({"in": "in"}), true);
        check("x.y/z=1", json!({"x.y/z": "1"}), true);
    }

    #[test]
    fn label_errors() {
        for bad in ["a=b=c", "a,", ",a", "a in b", "a in (b", "=a", "a b", "!", "a>b", "a=b,,c", "a===b", "-a", "a=-", "a/b/c", "a in (b))"] {
            assert!(LabelSelector::parse(bad).is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn label_objects() {
        let selector = LabelSelector::from_object(&json!({
            "matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d", "e"]}]}));
        assert_eq!(selector.unwrap().to_string(), "a=b,c notin (d,e)");
        assert!(LabelSelector::from_object(&Value::Null).unwrap().is_nothing());
        assert!(LabelSelector::from_object(&json!({})).unwrap().is_empty());
        assert!(LabelSelector::from_object(&json!({"matchExpressions": [{"key": "c", "operator": "Is"}]})).is_err());
        assert!(LabelSelector::from_object(&json!({"matchExpressions": [{"key": "c", "operator": "In"}]})).is_err());
    }

    #[test]
    fn fields() {
        let selector = FieldSelector::parse(r"metadata.name=a,spec.x!=b\,c,status.y==").unwrap();
        assert_eq!(selector.to_string(), r"metadata.name=a,spec.x!=b\,c,status.y=");
        assert_eq!(selector.exact("metadata.name"), Some("a"));
        assert_eq!(selector.exact("spec.x"), None);
        for bad in ["a", "a=b=c", r"a=\x", r"a=\"] {
            assert!(FieldSelector::parse(bad).is_err(), "{bad} was accepted");
        }
    }
}
