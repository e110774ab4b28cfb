//! `iptables-save` and `iptables-restore --noflush`, run as programs (the nft back end is what Debian and NixOS ship).
//!
//! A change is one transaction of one `iptables-restore`: it happens as a whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::cidr::Family;
use crate::error::{Error, Result};

/// How long a program waits for the xtables lock, and how long we wait for the program.
const LOCK_SECONDS: &str = "5";
const PROGRAM_DEADLINE: Duration = Duration::from_secs(60);

/// The prefix of the names of all chains of an instance: `KUBE-` for the only instance of a machine (what upstream's
/// tools and operators look for), `WL<hash>-` for a named one, so that two never share a chain.
pub fn chain_prefix(instance: &str) -> String {
    if instance.is_empty() {
        return "KUBE-".to_owned();
    }
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(instance.as_bytes());
    format!("WL{:02x}{:02x}-", digest[0], digest[1])
}

/// The programs of one family.
#[derive(Clone, Debug)]
pub struct Iptables {
    family: Family,
}

/// Where a rule goes among a built-in chain's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    First,
    Last,
}

/// A jump from a built-in chain to one of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jump {
    pub table: &'static str,
    pub chain: &'static str,
    pub position: Position,
    /// What comes before `-j`.
    pub matches: Vec<String>,
    pub target: String,
}

impl Jump {
    /// A jump with matches given as words.
    pub fn new(table: &'static str, chain: &'static str, position: Position, matches: &[&str], target: impl Into<String>) -> Jump {
        Jump { table, chain, position, matches: matches.iter().map(|s| (*s).to_owned()).collect(), target: target.into() }
    }

    /// The line that puts the jump in place, for `iptables-restore`.
    pub fn line(&self) -> String {
        let verb = if self.position == Position::First { "-I" } else { "-A" };
        let mut line = format!("{verb} {}", self.chain);
        for word in &self.matches {
            let _ = if word.contains(' ') { write!(line, " \"{word}\"") } else { write!(line, " {word}") };
        }
        let _ = write!(line, " -j {}", self.target);
        line
    }

    /// Whether `iptables-save`'s chains have a rule from this chain to this target.
    pub fn is_in(&self, saved: &BTreeMap<String, Vec<String>>) -> bool {
        saved.get(self.chain).is_some_and(|rules| rules.iter().any(|r| target(r) == Some(self.target.as_str())))
    }
}

impl Iptables {
    /// The programs for a family. Nothing is run yet.
    pub fn new(family: Family) -> Iptables {
        Iptables { family }
    }

    /// The family.
    pub fn family(&self) -> Family {
        self.family
    }

    fn program(&self, suffix: &str) -> String {
        let base = match self.family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let name = format!("{base}{suffix}");
        find_program(&name).map_or(name, |p| p.to_string_lossy().into_owned())
    }

    /// Whether the programs are there and work in this namespace.
    pub async fn usable(&self) -> Result<()> {
        self.save("nat").await.map(drop)
    }

    /// The table's chains and rules, in `iptables-save`'s form.
    pub async fn save(&self, table: &str) -> Result<String> {
        let program = self.program("-save");
        let output = run(&program, &["-t", table], None).await?;
        Ok(String::from_utf8_lossy(&check(&program, output)?.stdout).into_owned())
    }

    /// Applies a document in `iptables-restore`'s form as one transaction, leaving alone the chains that it does not name.
    pub async fn restore(&self, input: &str) -> Result<()> {
        let program = self.program("-restore");
        let output = run(&program, &["-w", LOCK_SECONDS, "--noflush"], Some(input)).await?;
        check(&program, output).map(drop)
    }

    /// Whether a chain exists. Cheap, also with many rules.
    pub async fn chain_exists(&self, table: &str, chain: &str) -> Result<bool> {
        let program = self.program("");
        // `-S CHAIN 1` prints the first rule only.
        Ok(run(&program, &["-w", LOCK_SECONDS, "-t", table, "-S", chain, "1"], None).await?.status.success())
    }

    /// Removes every chain for which `ours` holds, and every rule elsewhere that jumps to one. Returns how many chains went.
    pub async fn remove_chains(&self, tables: &[&str], ours: impl Fn(&str) -> bool) -> Result<usize> {
        let mut removed = 0;
        for table in tables {
            let saved = self.save(table).await?;
            let (script, chains) = removal(table, &saved, &ours);
            if chains > 0 {
                self.restore(&script).await?;
                removed += chains;
            }
        }
        Ok(removed)
    }
}

/// Finds a program on `PATH`, or where distributions put those of the administrator.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin", "/run/current-system/sw/bin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
}

pub(crate) async fn run(program: &str, args: &[&str], input: Option<&str>) -> Result<Output> {
    let start = |source| Error::Program { program: program.to_owned(), source };
    let mut child = Command::new(program)
        .args(args)
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let stdin = child.stdin.take();
    let feed = async {
        if let (Some(mut pipe), Some(text)) = (stdin, input) {
            // A program that gave up early closes the pipe; its status says why.
            let _ = pipe.write_all(text.as_bytes()).await;
        }
    };
    let both = async { tokio::join!(feed, child.wait_with_output()).1 };
    match tokio::time::timeout(PROGRAM_DEADLINE, both).await {
        Ok(output) => output.map_err(start),
        Err(_) => Err(Error::ProgramFailed {
            program: program.to_owned(),
            status: "no status".to_owned(),
            stderr: format!("it did not end within {} s", PROGRAM_DEADLINE.as_secs()),
        }),
    }
}

pub(crate) fn check(program: &str, output: Output) -> Result<Output> {
    if output.status.success() {
        return Ok(output);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let shown: String = stderr.trim().chars().take(2000).collect();
    Err(Error::ProgramFailed { program: program.to_owned(), status: output.status.to_string(), stderr: shown })
}

/// The chains declared in `iptables-save`'s output, with their rules (each with its `-A CHAIN ` in front).
pub fn parse_save(saved: &str) -> BTreeMap<String, Vec<String>> {
    let mut chains: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in saved.lines() {
        if let Some(declared) = line.strip_prefix(':') {
            let name = declared.split_whitespace().next().unwrap_or_default();
            chains.entry(name.to_owned()).or_default();
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let name = rule.split_whitespace().next().unwrap_or_default();
            chains.entry(name.to_owned()).or_default().push(line.to_owned());
        }
    }
    chains
}

/// The target of a rule in `iptables-save`'s form.
pub fn target(rule: &str) -> Option<&str> {
    let mut words = rule.split(' ');
    words.by_ref().find(|w| *w == "-j" || *w == "-g")?;
    words.next()
}

fn removal(table: &str, saved: &str, ours: &impl Fn(&str) -> bool) -> (String, usize) {
    let chains = parse_save(saved);
    let doomed: BTreeSet<&String> = chains.keys().filter(|c| ours(c)).collect();
    let mut script = format!("*{table}\n");
    for chain in &doomed {
        let _ = writeln!(script, ":{chain} - [0:0]");
    }
    for (chain, rules) in chains.iter().filter(|(c, _)| !doomed.contains(c)) {
        for rule in rules.iter().filter(|r| target(r).is_some_and(ours)) {
            // "-A CHAIN rest" becomes "-D CHAIN rest".
            let _ = writeln!(script, "-D {chain}{}", &rule["-A ".len() + chain.len()..]);
        }
    }
    for chain in &doomed {
        let _ = writeln!(script, "-X {chain}");
    }
    script.push_str("COMMIT\n");
    (script, doomed.len())
}

/// A table's chains with all their rules, to be replaced as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chains {
    /// By table, then by chain; a rule is what follows `-A CHAIN `.
    pub tables: BTreeMap<&'static str, BTreeMap<String, Vec<String>>>,
}

impl Chains {
    /// The rules of a chain, made if it is not there.
    pub fn chain(&mut self, table: &'static str, chain: impl Into<String>) -> &mut Vec<String> {
        self.tables.entry(table).or_default().entry(chain.into()).or_default()
    }

    /// The document for `iptables-restore` that brings about `self`, given that `old` was applied; `None` if nothing changed.
    /// Chains that are gone are removed in the same transaction, `jumps` are put in place in it.
    pub fn transaction(&self, old: Option<&Chains>, jumps: &[&Jump]) -> Option<String> {
        let empty = BTreeMap::new();
        let mut document = String::new();
        let names: BTreeSet<&'static str> = self
            .tables
            .keys()
            .chain(old.iter().flat_map(|o| o.tables.keys()))
            .copied()
            .chain(jumps.iter().map(|j| j.table))
            .collect();
        for table in names {
            let wanted = self.tables.get(table).unwrap_or(&empty);
            let had = old.and_then(|o| o.tables.get(table)).unwrap_or(&empty);
            let changed: Vec<_> = wanted.iter().filter(|(name, rules)| had.get(*name) != Some(rules)).collect();
            let gone: Vec<_> = had.keys().filter(|name| !wanted.contains_key(*name)).collect();
            let jumps: Vec<&&Jump> = jumps.iter().filter(|j| j.table == table).collect();
            if changed.is_empty() && gone.is_empty() && jumps.is_empty() {
                continue;
            }
            let _ = writeln!(document, "*{table}");
            for name in changed.iter().map(|(name, _)| *name).chain(gone.iter().copied()) {
                let _ = writeln!(document, ":{name} - [0:0]");
            }
            for (name, rules) in &changed {
                for rule in *rules {
                    let _ = writeln!(document, "-A {name} {rule}");
                }
            }
            for jump in jumps {
                let _ = writeln!(document, "{}", jump.line());
            }
            for name in gone {
                let _ = writeln!(document, "-X {name}");
            }
            document.push_str("COMMIT\n");
        }
        (!document.is_empty()).then_some(document)
    }

    /// How many rules there are in a table.
    pub fn rules(&self, table: &str) -> usize {
        self.tables.get(table).map_or(0, |chains| chains.values().map(Vec::len).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_names_of_instances_do_not_meet() {
        assert_eq!(chain_prefix(""), "KUBE-");
        let other = chain_prefix("two");
        assert_eq!(other.len(), 7);
        assert!(other.starts_with("WL") && other.ends_with('-'));
        assert_ne!(other, chain_prefix("three"));
        // The longest chain name must stay below the kernel's 29 bytes.
        assert!(format!("{other}SVC-ABCDEFGHIJKLMNOP").len() <= 28);
    }

    #[test]
    fn removal_takes_jumps_first_then_chains() {
        let saved = "# c\n*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-A - [0:0]\n:OTHER - [0:0]\n-A PREROUTING -m comment --comment \"x y\" -j KUBE-A\n-A PREROUTING -j OTHER\n-A KUBE-A -j OTHER\nCOMMIT\n";
        let (script, count) = removal("nat", saved, &|c: &str| c.starts_with("KUBE-"));
        assert_eq!(count, 1);
        assert_eq!(
            script,
            "*nat\n:KUBE-A - [0:0]\n-D PREROUTING -m comment --comment \"x y\" -j KUBE-A\n-X KUBE-A\nCOMMIT\n"
        );
    }

    #[test]
    fn a_jump_is_recognised_by_where_it_leads() {
        let jump = Jump::new("nat", "PREROUTING", Position::First, &["-m", "comment", "--comment", "a b"], "KUBE-A");
        assert_eq!(jump.line(), "-I PREROUTING -m comment --comment \"a b\" -j KUBE-A");
        assert!(jump.is_in(&parse_save("*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m comment --comment \"a b\" -j KUBE-A\n")));
        assert!(!jump.is_in(&parse_save("*nat\n:PREROUTING ACCEPT [0:0]\n-A OUTPUT -j KUBE-A\n-A PREROUTING -j KUBE-B\n")));
    }

    #[test]
    fn a_transaction_holds_what_changed_and_nothing_else() {
        let mut old = Chains::default();
        old.chain("nat", "A").push("-j ACCEPT".into());
        old.chain("nat", "B").push("-j ACCEPT".into());
        old.chain("filter", "F");
        assert_eq!(old.transaction(Some(&old), &[]), None);
        let mut new = old.clone();
        *new.chain("nat", "B") = vec!["-j DROP".into()];
        new.tables.get_mut("filter").unwrap().remove("F");
        assert_eq!(
            new.transaction(Some(&old), &[]).as_deref(),
            Some("*filter\n:F - [0:0]\n-X F\nCOMMIT\n*nat\n:B - [0:0]\n-A B -j DROP\nCOMMIT\n")
        );
        assert!(new.transaction(None, &[]).unwrap().contains("-A A -j ACCEPT"));
    }
}
