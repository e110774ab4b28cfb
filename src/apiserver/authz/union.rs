//! The configured authorization modes, asked in order.

use super::{Attributes, Authorizer, Decision, Rules};
use crate::authn::MASTERS;
use crate::request::UserInfo;
use std::sync::Arc;

/// `--authorization-mode` names that exist here.
pub const MODES: [&str; 4] = ["AlwaysAllow", "AlwaysDeny", "Node", "RBAC"];

/// Authorizers in order; `system:masters` stands above them.
pub struct Union {
    chain: Vec<(String, Arc<dyn Authorizer>)>,
}

/// Why a list of modes is refused.
#[derive(Debug, thiserror::Error)]
pub enum ModeError {
    #[error("authorization mode {0:?} is not known here: use some of AlwaysAllow, AlwaysDeny, Node, RBAC")]
    Unknown(String),
    #[error("authorization mode {0:?} is given twice: name each mode once")]
    Twice(String),
    #[error("no authorization mode is given: use for example Node,RBAC")]
    Empty,
}

impl Union {
    /// `modes` in order. The Node and RBAC authorizers are shared with admission, hence made by the caller.
    pub fn new(
        modes: &[String],
        node: Arc<dyn Authorizer>,
        rbac: Arc<dyn Authorizer>,
    ) -> Result<Union, ModeError> {
        let mut chain: Vec<(String, Arc<dyn Authorizer>)> = Vec::new();
        for mode in modes {
            let authorizer: Arc<dyn Authorizer> = match mode.as_str() {
                "AlwaysAllow" => Arc::new(AlwaysAllow),
                "AlwaysDeny" => Arc::new(AlwaysDeny),
                "Node" => node.clone(),
                "RBAC" => rbac.clone(),
                other => return Err(ModeError::Unknown(other.to_owned())),
            };
            let name = mode.to_lowercase();
            if chain.iter().any(|(known, _)| *known == name) {
                return Err(ModeError::Twice(mode.clone()));
            }
            chain.push((name, authorizer));
        }
        match chain.is_empty() {
            true => Err(ModeError::Empty),
            false => Ok(Union { chain }),
        }
    }
}

impl Authorizer for Union {
    fn authorize(&self, request: &Attributes<'_>) -> Decision {
        if request.user.groups.iter().any(|group| group == MASTERS) {
            return Decision::Allow(String::new());
        }
        let mut reasons = Vec::new();
        for (name, authorizer) in &self.chain {
            match authorizer.authorize(request) {
                Decision::NoOpinion(reason) if reason.is_empty() => {}
                Decision::NoOpinion(reason) => reasons.push(format!("{name}: {reason}")),
                decided => return decided,
            }
        }
        Decision::NoOpinion(reasons.join("\n"))
    }

    fn rules_for(&self, user: &UserInfo, namespace: &str) -> Rules {
        let mut all = Rules::default();
        let mut errors = Vec::new();
        for (_, authorizer) in &self.chain {
            let rules = authorizer.rules_for(user, namespace);
            all.rules.extend(rules.rules);
            all.incomplete |= rules.incomplete;
            errors.extend(rules.evaluation_error);
        }
        all.evaluation_error = match errors.as_slice() {
            [] => None,
            [one] => Some(one.clone()),
            many => Some(format!("[{}]", many.join(", "))),
        };
        all
    }
}

struct AlwaysAllow;

impl Authorizer for AlwaysAllow {
    fn authorize(&self, _: &Attributes<'_>) -> Decision {
        Decision::Allow(String::new())
    }
    fn rules_for(&self, _: &UserInfo, _: &str) -> Rules {
        let all = || vec!["*".to_owned()];
        let resources = super::rules::PolicyRule {
            verbs: all(),
            api_groups: all(),
            resources: all(),
            ..Default::default()
        };
        let paths = super::rules::PolicyRule { verbs: all(), non_resource_urls: all(), ..Default::default() };
        Rules { rules: vec![Arc::new(resources), Arc::new(paths)], ..Rules::default() }
    }
}

struct AlwaysDeny;

impl Authorizer for AlwaysDeny {
    fn authorize(&self, _: &Attributes<'_>) -> Decision {
        Decision::NoOpinion("Everything is forbidden.".to_owned())
    }
    fn rules_for(&self, _: &UserInfo, _: &str) -> Rules {
        Rules::default()
    }
}
