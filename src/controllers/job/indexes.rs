//! Sets of completion indexes, written as `1,3-5,7`.

use std::collections::BTreeSet;

/// A set of completion indexes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Indexes(pub BTreeSet<i32>);

impl Indexes {
    /// Reads the form that [`Self::format`] writes; indexes from `completions` on are left out, and so is what is malformed.
    pub fn parse(text: &str, completions: i32) -> Self {
        let mut set = BTreeSet::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(first), Ok(last)) = (first.parse::<i32>(), last.parse::<i32>()) else { continue };
            set.extend(first.max(0)..=last.min(completions - 1));
        }
        Indexes(set)
    }

    /// Runs of three and more (and of two, as upstream) are written as ranges.
    pub fn format(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut all = self.0.iter().copied().peekable();
        while let Some(first) = all.next() {
            let mut last = first;
            while let Some(next) = all.next_if(|next| *next == last + 1) {
                last = next;
            }
            parts.push(match last - first {
                0 => first.to_string(),
                1 => format!("{first},{last}"),
                _ => format!("{first}-{last}"),
            });
        }
        parts.join(",")
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn contains(&self, index: i32) -> bool {
        self.0.contains(&index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        for (text, completions, expected) in [("", 5, ""), ("1,3-5,7", 10, "1,3-5,7"), ("0-3", 2, "0,1"), ("1,2,3", 10, "1-3"), ("x,2", 10, "2"), ("3,4", 10, "3,4")] {
            assert_eq!(Indexes::parse(text, completions).format(), expected, "{text}");
        }
    }
}
