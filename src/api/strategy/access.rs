//! RBAC kinds and CertificateSigningRequest.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::field::ErrorKind;
use crate::meta;
use crate::strategy::at::{At, default_at, get, get_mut, items, items_mut, remove, same, set, text};
use crate::strategy::names;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, selectors};

const GROUP: &str = "rbac.authorization.k8s.io";

// === RBAC ===

/// Roles.
pub static ROLE: Rules =
    Rules { name: names::path_segment, create_on_update: true, validate: &[|_, o| rules(o, true)], ..Rules::PLAIN };

/// ClusterRoles.
pub static CLUSTER_ROLE: Rules = Rules {
    name: names::path_segment,
    create_on_update: true,
    validate: &[|_, o| {
        rules(o, false);
        let aggregation = o.at("aggregationRule");
        if aggregation.present() {
            let list = aggregation.at("clusterRoleSelectors");
            if list.is_empty() {
                list.required("at least one clusterRoleSelector required if aggregationRule is non-nil");
            }
            list.each(selectors::label_selector);
        }
    }],
    ..Rules::PLAIN
};

fn rules(o: &At<'_>, namespaced: bool) {
    for rule in o.at("rules").items() {
        if rule.at("verbs").is_empty() {
            rule.at("verbs").required("");
        }
        let (urls, groups, resources) = (rule.at("nonResourceURLs"), rule.at("apiGroups"), rule.at("resources"));
        if !urls.is_empty() {
            if namespaced {
                urls.invalid("namespaced rules cannot apply to non-resource URLs");
            }
            if !groups.is_empty() || !resources.is_empty() || !rule.at("resourceNames").is_empty() {
                urls.invalid("rules cannot apply to both regular resources and non-resource URLs");
            }
            continue;
        }
        if groups.is_empty() {
            groups.required("resource rules must supply at least one api group");
        }
        if resources.is_empty() {
            resources.required("resource rules must supply at least one resource");
        }
    }
}

/// RoleBindings.
pub static ROLE_BINDING: Rules = Rules {
    name: names::path_segment,
    create_on_update: true,
    defaults: &[|_, o| binding_defaults(o)],
    validate: &[|_, o| binding(o, true)],
    validate_update: &[|_, o, old| role_ref_update(o, old)],
    ..Rules::PLAIN
};

/// ClusterRoleBindings.
pub static CLUSTER_ROLE_BINDING: Rules = Rules {
    name: names::path_segment,
    create_on_update: true,
    defaults: &[|_, o| binding_defaults(o)],
    validate: &[|_, o| binding(o, false)],
    validate_update: &[|_, o, old| role_ref_update(o, old)],
    ..Rules::PLAIN
};

fn role_ref_update(o: &At<'_>, old: &Value) {
    if !same(&o.value["roleRef"], &old["roleRef"]) {
        o.at("roleRef").invalid("cannot change roleRef");
    }
}

fn binding_defaults(o: &mut Value) {
    let group = |v: &mut Value| {
        if text(v, "apiGroup").is_empty() {
            set(v, "apiGroup", GROUP.into());
        }
    };
    if let Some(r) = o.get_mut("roleRef").filter(|r| r.is_object()) {
        group(r);
    }
    for s in items_mut(o, "subjects") {
        if matches!(text(s, "kind"), "User" | "Group") {
            group(s);
        }
    }
}

fn binding(o: &At<'_>, namespaced: bool) {
    let role = o.at("roleRef");
    if role.text("apiGroup") != GROUP {
        role.at("apiGroup").error(
            ErrorKind::NotSupported,
            Some(role.text("apiGroup").into()),
            format!("supported values: \"{GROUP}\""),
        );
    }
    let kinds: &[&str] = if namespaced { &["Role", "ClusterRole"] } else { &["ClusterRole"] };
    if !kinds.contains(&role.text("kind")) {
        let kind = Value::from(role.text("kind"));
        role.at("kind").with(&kind).not_supported(kinds);
    }
    if role.at("name").require() {
        role.at("name").syntax(names::path_segment);
    }
    for s in o.at("subjects").items() {
        let (kind, group, name) = (s.at("kind"), s.at("apiGroup"), s.at("name"));
        name.require();
        let group_value = Value::from(group.str());
        match kind.str() {
            "" => kind.not_supported(&["ServiceAccount", "User", "Group"]),
            "ServiceAccount" => {
                if !name.is_empty() {
                    name.syntax(names::dns1123_subdomain);
                }
                if !group.is_empty() {
                    group.not_supported(&[""]);
                }
                if !namespaced && s.at("namespace").is_empty() {
                    s.at("namespace").required("");
                }
            }
            "User" | "Group" => {
                if group.str() != GROUP {
                    group.with(&group_value).not_supported(&[GROUP]);
                }
            }
            _ => kind.not_supported(&["ServiceAccount", "User", "Group"]),
        }
    }
}

// === CertificateSigningRequest ===

const USAGES: [&str; 23] = [
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

/// CertificateSigningRequests: the spec never changes; approval and certificate have a subresource each.
/// That the request's signature holds is checked where certificates are parsed, not here.
pub static CSR: Rules = Rules {
    name: |_| Vec::new(),
    defaults: &[|_, o| {
        default_at(o, "spec.usages", json!(["digital signature", "key encipherment"]));
    }],
    create: &[csr_create],
    update: &[|_, new, old| set(new, "spec", old["spec"].clone())],
    status_update: &[|ctx, new, old| {
        for kind in ["Approved", "Denied"] {
            keep_conditions(new, old, kind);
        }
        condition_times(ctx, new, old);
    }],
    subresource_update: &[("approval", |ctx, new, old| {
        condition_times(ctx, new, old);
        let conditions = get(new, "status.conditions").clone();
        set(new, "spec", old["spec"].clone());
        set(new, "status", old["status"].clone());
        set(new, "status.conditions", conditions);
    })],
    validate: &[csr],
    validate_update: &[|_, o, old| csr_update(o, old, false, false)],
    validate_status: &[|_, o, old| {
        csr_conditions(o);
        csr_update(o, old, false, true);
    }],
    subresource_validate: &[("approval", |_, o, old| csr_update(o, old, true, false))],
    reset_status: &["spec"],
    ..Rules::STATUS
};

fn csr_create(ctx: &Context<'_>, o: &mut Value) {
    for field in ["username", "uid", "groups", "extra"] {
        remove(o, &format!("spec.{field}"));
    }
    if let Some(user) = ctx.user {
        set(o, "spec.username", user.name.clone().into());
        if !user.uid.is_empty() {
            set(o, "spec.uid", user.uid.clone().into());
        }
        if !user.groups.is_empty() {
            set(o, "spec.groups", user.groups.clone().into());
        }
        if !user.extra.is_empty() {
            set(o, "spec.extra", json!(user.extra));
        }
    }
    set(o, "status", json!({}));
}

fn keep_conditions(new: &mut Value, old: &Value, kind: &str) {
    let was: Vec<Value> =
        items(old, "status.conditions").iter().filter(|c| text(c, "type") == kind).cloned().collect();
    let count = items(new, "status.conditions").iter().filter(|c| text(c, "type") == kind).count();
    if was.len() != count {
        return;
    }
    let mut was = was.into_iter();
    for c in items_mut(new, "status.conditions") {
        if text(c, "type") == kind
            && let Some(w) = was.next()
        {
            *c = w;
        }
    }
}

fn condition_times(ctx: &Context<'_>, new: &mut Value, old: &Value) {
    let now = meta::now_rfc3339(ctx.now);
    let Some(list) = get_mut(new, "status.conditions").and_then(Value::as_array_mut) else { return };
    for c in list {
        if c["lastUpdateTime"].is_null() {
            set(c, "lastUpdateTime", now.clone().into());
        }
        if c["lastTransitionTime"].is_null() {
            let was = items(old, "status.conditions")
                .iter()
                .find(|o| text(o, "type") == text(c, "type") && text(o, "status") == text(c, "status"))
                .map(|o| o["lastTransitionTime"].clone())
                .filter(|t| !t.is_null());
            set(c, "lastTransitionTime", was.unwrap_or_else(|| now.clone().into()));
        }
    }
}

fn csr(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let request = spec.at("request");
    let pem = STANDARD.decode(request.str()).unwrap_or_default();
    if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE REQUEST-----") {
        request.invalid_value(request.str(), "PEM block type must be CERTIFICATE REQUEST");
    }
    let usages = spec.at("usages");
    if usages.is_empty() {
        usages.required("");
    }
    let mut seen: Vec<String> = Vec::new();
    for u in usages.items() {
        if !USAGES.contains(&u.str()) {
            u.not_supported(&USAGES);
        }
        if seen.iter().any(|s| s == u.str()) {
            u.duplicate();
        }
        seen.push(u.str().to_owned());
    }
    let signer = spec.at("signerName");
    if signer.str() == "kubernetes.io/legacy-unknown" {
        signer.invalid("the legacy signerName is not allowed via this API version");
    } else {
        signer_name(&signer);
    }
    let seconds = spec.at("expirationSeconds");
    if seconds.int().is_some_and(|n| n < 600) {
        seconds.invalid("may not specify a duration less than 600 seconds (10 minutes)");
    }
    csr_conditions(o);
}

/// A signer's name: a domain of two labels at least, a slash, and a path of labels.
pub fn signer_name(at: &At<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    let parts: Vec<&str> = at.str().split('/').collect();
    let [domain, path] = parts.as_slice() else {
        return at.invalid("must be a fully qualified domain and path of the form 'example.com/signer-name'");
    };
    if domain.len() > 253 {
        at.too_long(253);
    }
    let check = |whole: &str, rule: names::Rule| {
        for label in whole.split('.') {
            let bad = rule(label);
            if !bad.is_empty() {
                for msg in bad {
                    at.invalid_value(whole, format!("validating label {label:?}: {msg}"));
                }
                return;
            }
        }
    };
    check(domain, names::dns1123_label);
    if !domain.contains('.') {
        at.invalid_value(*domain, "should be a domain with at least two segments separated by dots");
    }
    check(path, names::dns1123_subdomain);
    if at.str().len() > 571 {
        at.too_long(571);
    }
}

fn csr_conditions(o: &At<'_>) {
    let conditions = o.at("status.conditions");
    let (mut approved, mut denied) = (false, false);
    let mut seen: Vec<String> = Vec::new();
    for c in conditions.items() {
        let (kind, status) = (c.at("type"), c.at("status"));
        kind.require();
        if matches!(kind.str(), "Approved" | "Denied" | "Failed") {
            status.one_of(&["True"]);
        } else {
            status.one_of(&["False", "True", "Unknown"]);
        }
        approved |= kind.str() == "Approved";
        denied |= kind.str() == "Denied";
        if approved && denied && matches!(kind.str(), "Approved" | "Denied") {
            conditions.invalid_value(kind.str(), "Approved and Denied conditions are mutually exclusive");
        }
        if seen.iter().any(|s| s == kind.str()) {
            kind.duplicate();
        }
        seen.push(kind.str().to_owned());
    }
}

fn csr_update(o: &At<'_>, old: &Value, approve: bool, issue: bool) {
    let at = o.at("status.conditions");
    let of = |v: &Value, kind: &str| -> Vec<Value> {
        items(v, "status.conditions").iter().filter(|c| text(c, "type") == kind).cloned().collect()
    };
    for kind in ["Approved", "Denied", "Failed"] {
        let (new, was) = (of(o.value, kind), of(old, kind));
        if new.len() < was.len() {
            at.forbidden(format!("updates may not remove a condition of type {kind:?}"));
            continue;
        }
        if approve || kind == "Failed" {
            continue;
        }
        if new.len() > was.len() {
            at.forbidden(format!("updates may not add a condition of type {kind:?}"));
        } else if !new.iter().zip(&was).all(|(a, b)| same(a, b)) {
            at.forbidden(format!("updates may not modify a condition of type {kind:?}"));
        }
    }
    let certificate = o.at("status.certificate");
    if !same(certificate.value, get(old, "status.certificate")) {
        if !issue {
            certificate.forbidden("updates may not set certificate content");
        } else if !text(old, "status.certificate").is_empty() {
            certificate.forbidden("updates may not modify existing certificate content");
        }
    }
}
