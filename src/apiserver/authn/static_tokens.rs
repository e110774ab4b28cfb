//! The static token file: `token,user,uid[,"group1,group2"]` per line (`--token-auth-file`).

use super::Authenticated;
use super::bearer::{Token, TokenAuthenticator};
use crate::request::UserInfo;
use async_trait::async_trait;
use std::path::{Path, PathBuf};

/// Why a token file is refused.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("token file {path}: {source}; give a readable file")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("token file {path}, line {line}: {what}; a line is token,user,uid,\"group1,group2\"")]
    Line { path: PathBuf, line: usize, what: &'static str },
}

/// Tokens from a file, read once at start.
pub struct StaticTokens {
    users: Vec<(Vec<u8>, UserInfo)>,
}

/// Splits one line of CSV with optional double quotes.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for character in line.chars() {
        match (character, quoted) {
            ('"', _) => quoted = !quoted,
            (',', false) => fields.push(String::new()),
            (other, _) => {
                if let Some(last) = fields.last_mut() {
                    last.push(other);
                }
            }
        }
    }
    fields.into_iter().map(|field| field.trim().to_owned()).collect()
}

impl StaticTokens {
    pub fn load(path: &Path) -> Result<StaticTokens, FileError> {
        let read = std::fs::read_to_string(path);
        let text = read.map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        StaticTokens::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<StaticTokens, FileError> {
        let mut users: Vec<(Vec<u8>, UserInfo)> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what| FileError::Line { path: path.to_owned(), line: index + 1, what };
            let fields = fields(line);
            let [token, name, uid, rest @ ..] = fields.as_slice() else {
                return Err(wrong("it has fewer than three fields"));
            };
            if token.is_empty() || name.is_empty() {
                return Err(wrong("token or user is empty"));
            }
            if users.iter().any(|(known, _)| known == token.as_bytes()) {
                return Err(wrong("the token is given twice"));
            }
            let groups = rest.first().map(|list| list.split(',').map(|group| group.trim().to_owned()));
            let groups = groups.into_iter().flatten().filter(|group| !group.is_empty()).collect();
            let user = UserInfo { name: name.clone(), uid: uid.clone(), groups, extra: Default::default() };
            users.push((token.as_bytes().to_vec(), user));
        }
        Ok(StaticTokens { users })
    }
}

#[async_trait]
impl TokenAuthenticator for StaticTokens {
    async fn authenticate_token(&self, token: &str, audiences: &[String]) -> Token {
        let mut found = None;
        // All are compared, in constant time each: how long it takes tells nothing.
        for (known, user) in &self.users {
            if super::same_secret(known, token.as_bytes()) {
                found = Some(user);
            }
        }
        match found {
            Some(user) => {
                Token::Good(Authenticated { user: user.clone(), audiences: audiences.to_vec(), warning: None })
            }
            None => Token::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(text: &str, token: &str, expected: Result<Option<(&str, &str, &[&str])>, &str>) {
        let parsed = StaticTokens::parse(text, Path::new("tokens.csv"));
        match (parsed, expected) {
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (Ok(tokens), Ok(expected)) => {
                let got = match tokens.authenticate_token(token, &[]).await {
                    Token::Good(result) => Some(result.user),
                    _ => None,
                };
                let expected = expected.map(|(name, uid, groups)| UserInfo {
                    name: name.into(),
                    uid: uid.into(),
                    groups: groups.iter().map(|&group| group.into()).collect(),
                    extra: Default::default(),
                });
                assert_eq!(got, expected, "{text:?} {token}");
            }
            (got, expected) => panic!("{text:?}: {:?} but expected {expected:?}", got.err()),
        }
    }

    #[tokio::test]
    async fn lines() {
        let file = "t1,ann,1,\"devs,ops\"\n\n# a comment\nt2,bob,2\nt3,cat,3,one\n";
        check(file, "t1", Ok(Some(("ann", "1", &["devs", "ops"])))).await;
        check(file, "t2", Ok(Some(("bob", "2", &[])))).await;
        check(file, "t3", Ok(Some(("cat", "3", &["one"])))).await;
        check(file, "t4", Ok(None)).await;
        check("t1,ann\n", "", Err("line 1: it has fewer than three fields")).await;
        check("t1,ann,1\nt1,bob,2\n", "", Err("line 2: the token is given twice")).await;
        check(",ann,1\n", "", Err("token or user is empty")).await;
    }
}
