//! Image references: `[registry/]repository[:tag][@digest]`.

/// A reference taken apart, with Docker's defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// `docker.io` when none is written.
    pub registry: String,
    /// `library/` is added for Docker Hub's official images.
    pub repository: String,
    pub tag: Option<String>,
    pub digest: Option<String>,
}

impl Reference {
    /// Errors name what is wrong with the text, in the words of the API reason `InvalidImageName`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bad = |why: &str| format!("couldn't parse image name \"{text}\": {why}");
        if text.is_empty() {
            return Err(bad("invalid reference format"));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let valid = digest.split_once(':').is_some_and(|(algorithm, hex)| {
                    !algorithm.is_empty() && hex.len() >= 32 && hex.bytes().all(|b| b.is_ascii_hexdigit())
                });
                if !valid {
                    return Err(bad("invalid reference format"));
                }
                (rest, Some(digest.to_owned()))
            }
            None => (text, None),
        };
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        if let Some(tag) = tag {
            let valid = !tag.is_empty()
                && tag.len() <= 128
                && tag.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
                && !tag.starts_with(['.', '-']);
            if !valid {
                return Err(bad("invalid reference format"));
            }
        }
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if first.contains(['.', ':']) || first == "localhost" => (first, path),
            _ => ("docker.io", name),
        };
        if path.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad("invalid reference format: repository name must be lowercase"));
        }
        let valid_path = !path.is_empty()
            && path.split('/').all(|part| {
                !part.is_empty()
                    && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
                    && part.as_bytes()[0].is_ascii_alphanumeric()
            });
        if !valid_path {
            return Err(bad("invalid reference format"));
        }
        let repository = match registry {
            "docker.io" | "index.docker.io" if !path.contains('/') => format!("library/{path}"),
            _ => path.to_owned(),
        };
        let registry = if registry == "index.docker.io" { "docker.io" } else { registry };
        let tag = match (tag, &digest) {
            (Some(tag), _) => Some(tag.to_owned()),
            (None, None) => Some("latest".to_owned()),
            (None, Some(_)) => None,
        };
        Ok(Self { registry: registry.to_owned(), repository, tag, digest })
    }

    /// Whether `imagePullPolicy` defaults to Always for it.
    pub fn is_latest(&self) -> bool {
        self.digest.is_none() && self.tag.as_deref() == Some("latest")
    }

    /// The tag or digest to ask a registry for.
    pub fn version(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<(&str, &str, Option<&str>, bool)>) {
        let got = Reference::parse(text).ok();
        let got = got.as_ref().map(|r| (r.registry.as_str(), r.repository.as_str(), r.tag.as_deref(), r.digest.is_some()));
        assert_eq!(got, expected, "{text}");
    }

    #[test]
    fn references() {
        let digest = format!("sha256:{}", "a".repeat(64));
        check("busybox", Some(("docker.io", "library/busybox", Some("latest"), false)));
        check("library/busybox:1.36", Some(("docker.io", "library/busybox", Some("1.36"), false)));
        check("localhost:5000/a/b:x", Some(("localhost:5000", "a/b", Some("x"), false)));
        check("registry.k8s.io/e2e-test-images/agnhost:2.40", Some(("registry.k8s.io", "e2e-test-images/agnhost", Some("2.40"), false)));
        check(&format!("quay.io/x/y@{digest}"), Some(("quay.io", "x/y", None, true)));
        check(&format!("quay.io/x/y:v1@{digest}"), Some(("quay.io", "x/y", Some("v1"), true)));
        check("host:5000/x", Some(("host:5000", "x", Some("latest"), false)));
        for bad in ["", "FOO", "a//b", "a:", "a@sha256:zz", "a b", "-a", "a:.tag"] {
            check(bad, None);
        }
    }
}
