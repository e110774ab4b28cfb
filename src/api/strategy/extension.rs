//! Kinds that extend the API: CustomResourceDefinition, webhook configurations, admission policies, APIService.

use serde_json::{Value, json};

use crate::registry::Resource;
use crate::strategy::at::{At, default_at, default_text, get, items, items_mut, same, set, text};
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, selectors};
use crate::table::JsonPath;

// === CustomResourceDefinition ===

const COLUMN_TYPES: &str = "boolean,date,integer,number,string";
const COLUMN_FORMATS: &str = "byte,date,date-time,double,float,int32,int64,password";
const APPROVED: &str = "api-approved.kubernetes.io";

/// CustomResourceDefinitions.
pub static CRD: Rules = Rules {
    unconditional_update: false,
    warnings: &[|o, out| out.extend(crate::registry::custom::warnings(o))],
    defaults: &[|_, o| {
        let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
        let kind = text(spec, "names.kind").to_owned();
        if !kind.is_empty() {
            default_text(spec, "names.singular", &kind.to_lowercase());
            default_text(spec, "names.listKind", &format!("{kind}List"));
        }
        default_at(spec, "conversion", json!({"strategy": "None"}));
        if get(spec, "conversion.webhook.clientConfig.service").is_object() {
            default_at(spec, "conversion.webhook.clientConfig.service.port", 443);
        }
    }],
    create: &[|_, o| {
        set(o, "status", json!({"acceptedNames": {"kind": "", "plural": ""}, "conditions": []}));
        store_version(o);
    }],
    update: &[|_, o, _| store_version(o)],
    validate: &[crd],
    validate_update: &[crd_update],
    ..Rules::SPEC_STATUS
};

/// The storage version is among the stored ones.
fn store_version(o: &mut Value) {
    let Some(version) = items(o, "spec.versions").iter().find(|v| v["storage"] == true) else { return };
    let name = version["name"].clone();
    let mut stored = items(o, "status.storedVersions").to_vec();
    if !stored.contains(&name) {
        stored.push(name);
        set(o, "status.storedVersions", stored.into());
    }
}

fn crd(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let group = spec.at("group");
    let plural = spec.at("names.plural");
    let want = format!("{}.{}", plural.str(), group.str());
    if o.text("metadata.name") != want {
        o.at("metadata.name").invalid("must be spec.names.plural+\".\"+spec.group");
    }
    if group.require() {
        let bad = names::dns1123_subdomain(group.str());
        if !bad.is_empty() {
            group.invalid(bad.join(","));
        } else if !group.str().contains('.') {
            group.invalid("should be a domain with at least one dot");
        }
    }
    spec.at("scope").one_of(&["Cluster", "Namespaced"]);
    crd_names(&spec.at("names"));
    crd_versions(&spec);
    conversion(&spec.at("conversion"));
    if spec.flag("preserveUnknownFields") {
        spec.at("preserveUnknownFields").invalid(
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead",
        );
    }
    approval(o, group.str());
    if !o.has("metadata.resourceVersion") {
        schema_errors(o);
    }
}

fn approval(o: &At<'_>, group: &str) {
    let protected = group == "k8s.io" || group == "kubernetes.io" || group.ends_with(".k8s.io") || group.ends_with(".kubernetes.io");
    if !protected || o.has("metadata.resourceVersion") {
        return;
    }
    let annotations = o.at("metadata.annotations");
    let at = annotations.key(APPROVED);
    let value = at.str();
    if value.is_empty() {
        at.required(
            "protected groups must have approval annotation \"api-approved.kubernetes.io\", see https://github.com/kubernetes/enhancements/pull/1111",
        );
    } else if !["unapproved", "https://", "http://"].iter().any(|known| value.starts_with(known)) {
        at.invalid(
            "protected groups must have approval annotation \"api-approved.kubernetes.io\" with either a URL or a reason starting with \"unapproved\", see https://github.com/kubernetes/enhancements/pull/1111",
        );
    }
}

fn crd_names(n: &At<'_>) {
    for field in ["plural", "singular", "kind", "listKind"] {
        let at = n.at(field);
        if !at.require() {
            continue;
        }
        let cased = matches!(field, "kind" | "listKind");
        let bad = names::dns1035_label(&if cased { at.str().to_lowercase() } else { at.str().to_owned() });
        if !bad.is_empty() {
            let prefix = if cased { "may have mixed case, but should otherwise match: " } else { "" };
            at.invalid(format!("{prefix}{}", bad.join(",")));
        }
    }
    for list in ["shortNames", "categories"] {
        n.at(list).each(|s| {
            let bad = names::dns1035_label(s.str());
            if !bad.is_empty() {
                s.invalid(bad.join(","));
            }
        });
    }
    if !n.at("kind").is_empty() && n.text("kind") == n.text("listKind") {
        n.at("listKind").invalid("kind and listKind may not be the same");
    }
}

fn crd_versions(spec: &At<'_>) {
    let versions = spec.at("versions");
    let (mut storage, mut seen, mut unique): (usize, Vec<String>, bool) = (0, Vec::new(), true);
    for v in versions.items() {
        let name = v.at("name");
        storage += usize::from(v.flag("storage"));
        unique &= !seen.iter().any(|s| s == name.str());
        seen.push(name.str().to_owned());
        let bad = names::dns1035_label(name.str());
        if !bad.is_empty() {
            name.invalid_value(name.str(), bad.join(","));
        }
        crd_version(&v);
    }
    if !unique {
        versions.invalid("must contain unique version names");
    }
    if storage != 1 {
        versions.invalid("must have exactly one version marked as storage version");
    }
}

fn crd_version(v: &At<'_>) {
    let schema = v.at("schema.openAPIV3Schema");
    if !schema.present() {
        schema.required("");
    }
    let warning = v.at("deprecationWarning");
    if warning.present() {
        if !v.flag("deprecated") {
            warning.invalid("can only be set for deprecated versions");
        }
        if warning.str().len() > 256 {
            warning.invalid("must be <= 256 characters long");
        }
        if warning.is_empty() {
            warning.invalid("must not be an empty string");
        }
    }
    let scale = v.at("subresources.scale");
    if scale.present() {
        for (field, prefix) in [("specReplicasPath", ".spec."), ("statusReplicasPath", ".status.")] {
            let at = scale.at(field);
            if at.require() && !at.str().starts_with(prefix) {
                at.invalid(format!("should be a json path under {}", prefix.trim_end_matches('.')));
            }
        }
        let selector = scale.at("labelSelectorPath");
        let ok = selector.is_empty() || selector.str().starts_with(".spec.") || selector.str().starts_with(".status.");
        if !ok {
            selector.invalid("should be a json path under either .spec or .status");
        }
    }
    for c in v.at("additionalPrinterColumns").items() {
        c.at("name").require();
        let (kind, format, path) = (c.at("type"), c.at("format"), c.at("jsonPath"));
        if kind.is_empty() {
            kind.required(format!("must be one of {COLUMN_TYPES}"));
        } else if !COLUMN_TYPES.split(',').any(|t| t == kind.str()) {
            kind.invalid(format!("must be one of {COLUMN_TYPES}"));
        }
        if !format.is_empty() && !COLUMN_FORMATS.split(',').any(|f| f == format.str()) {
            format.invalid(format!("must be one of {COLUMN_FORMATS}"));
        }
        let shown = c.at("JSONPath");
        if path.is_empty() {
            shown.required("");
        } else if !path.str().starts_with('.') || JsonPath::parse(path.str()).is_none() {
            shown.invalid_value(path.str(), "is an invalid jsonpath: must be a simple json path starting with .");
        }
    }
    let selectable = v.at("selectableFields");
    if selectable.len() > 8 {
        selectable.too_many(8);
    }
    let mut seen: Vec<String> = Vec::new();
    for f in selectable.items() {
        let path = f.at("jsonPath");
        if !path.require() {
            continue;
        }
        if seen.iter().any(|s| s == path.str()) {
            path.duplicate();
        }
        if path.str().starts_with(".metadata.") || path.str() == ".metadata" {
            path.invalid("must not point to fields in metadata");
        }
        seen.push(path.str().to_owned());
    }
}

fn conversion(c: &At<'_>) {
    if !c.present() {
        return;
    }
    let (strategy, webhook) = (c.at("strategy"), c.at("webhook"));
    strategy.one_of(&["None", "Webhook"]);
    if strategy.str() != "Webhook" {
        if webhook.has("clientConfig") {
            c.at("webhookClientConfig").forbidden("should not be set when strategy is not set to Webhook");
        }
        return;
    }
    let client = webhook.at("clientConfig");
    if client.present() {
        client_config(&client);
    } else {
        c.at("webhookClientConfig").required("required when strategy is set to Webhook");
    }
    review_versions(&webhook.at("conversionReviewVersions"), &["v1", "v1beta1"]);
}

fn review_versions(at: &At<'_>, known: &[&str]) {
    if at.is_empty() {
        return at.required("");
    }
    let mut seen: Vec<String> = Vec::new();
    for v in at.items() {
        if seen.iter().any(|s| s == v.str()) {
            v.invalid("duplicate version");
            continue;
        }
        seen.push(v.str().to_owned());
        v.syntax(names::dns1035_label);
    }
    if !seen.iter().any(|s| known.contains(&s.as_str())) {
        at.invalid(format!("must include at least one of {}", known.join(", ")));
    }
}

/// Where a webhook is: a URL or a service.
fn client_config(c: &At<'_>) {
    let (url, service) = (c.at("url"), c.at("service"));
    if url.present() == service.present() {
        return c.required("exactly one of url or service is required");
    }
    if url.present() {
        match url.str().strip_prefix("https://") {
            None => url.invalid("'https' is the only allowed URL scheme; desired format: https://host[/path]"),
            Some(rest) => {
                if rest.split('/').next().unwrap_or("").is_empty() {
                    url.invalid("host must be specified; desired format: https://host[/path]");
                }
                if rest.contains('@') {
                    url.invalid("user information is not permitted in the URL; desired format: https://host[/path]");
                }
                if rest.contains('#') {
                    url.invalid("fragments are not permitted in the URL; desired format: https://host[/path]");
                }
                if rest.contains('?') {
                    url.invalid("query parameters are not permitted in the URL; desired format: https://host[/path]");
                }
            }
        }
        return;
    }
    for field in ["name", "namespace"] {
        service.at(field).require();
    }
    let port = service.at("port");
    if port.int().is_some_and(|n| !(1..=65535).contains(&n)) {
        port.invalid("port is not valid: must be between 1 and 65535, inclusive");
    }
    let path = service.at("path");
    if path.present() && !path.is_empty() && path.str() != "/" {
        if !path.str().starts_with('/') {
            path.invalid("must start with a '/'");
        }
        for (i, segment) in path.str().trim_matches('/').split('/').enumerate() {
            if segment.is_empty() {
                path.invalid(format!("segment[{i}] may not be empty"));
            }
        }
    }
}

fn crd_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let established = items(old, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == "Established" && text(c, "status") == "True");
    if established {
        o.at("spec.scope").immutable(get(old, "spec.scope"));
        o.at("spec.names.kind").immutable(get(old, "spec.names.kind"));
    }
    o.at("spec.group").immutable(get(old, "spec.group"));
    o.at("spec.names.plural").immutable(get(old, "spec.names.plural"));
    let stored = o.at("status.storedVersions");
    for v in stored.items() {
        let name = v.str();
        if !items(o.value, "spec.versions").iter().any(|s| text(s, "name") == name) {
            v.invalid(format!(
                "missing from spec.versions; {name} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {name} and removes {name} from status.storedVersions"
            ));
        }
    }
    if !same(get(o.value, "spec.versions"), get(old, "spec.versions")) {
        schema_errors(o);
    }
}

/// What is wrong with the schemas themselves.
fn schema_errors(o: &At<'_>) {
    if let Err(errors) = Resource::from_crd(o.value) {
        for e in errors {
            o.push(e);
        }
    }
}

// === Webhook configurations ===

/// ValidatingWebhookConfigurations.
pub static VALIDATING_WEBHOOK: Rules = Rules {
    generation: &["webhooks"],
    defaults: &[|_, o| webhook_defaults(o, false)],
    validate: &[|_, o| webhooks(o, false)],
    ..Rules::PLAIN
};

/// MutatingWebhookConfigurations.
pub static MUTATING_WEBHOOK: Rules = Rules {
    generation: &["webhooks"],
    defaults: &[|_, o| webhook_defaults(o, true)],
    validate: &[|_, o| webhooks(o, true)],
    ..Rules::PLAIN
};

fn match_defaults(m: &mut Value) {
    default_at(m, "matchPolicy", "Equivalent");
    default_at(m, "namespaceSelector", json!({}));
    default_at(m, "objectSelector", json!({}));
}

fn webhook_defaults(o: &mut Value, mutating: bool) {
    for w in items_mut(o, "webhooks") {
        default_at(w, "failurePolicy", "Fail");
        match_defaults(w);
        default_at(w, "timeoutSeconds", 10);
        if mutating {
            default_at(w, "reinvocationPolicy", "Never");
        }
        if get(w, "clientConfig.service").is_object() {
            default_at(w, "clientConfig.service.port", 443);
        }
        for r in items_mut(w, "rules") {
            default_at(r, "scope", "*");
        }
    }
}

fn webhooks(o: &At<'_>, mutating: bool) {
    let mut seen: Vec<String> = Vec::new();
    for w in o.at("webhooks").items() {
        let name = w.at("name");
        names::fully_qualified(&name);
        if !name.is_empty() {
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
        }
        for r in w.at("rules").items() {
            rule(&r, true);
        }
        w.at("failurePolicy").optional_one_of(&["Fail", "Ignore"]);
        w.at("matchPolicy").optional_one_of(&["Equivalent", "Exact"]);
        let effects = w.at("sideEffects");
        if effects.present() {
            effects.optional_one_of(&["None", "NoneOnDryRun"]);
        } else {
            effects.required("must specify one of None, NoneOnDryRun");
        }
        let timeout = w.at("timeoutSeconds");
        if timeout.int().is_some_and(|n| !(1..=30).contains(&n)) {
            timeout.invalid("the timeout value must be between 1 and 30 seconds");
        }
        for s in ["namespaceSelector", "objectSelector"] {
            selectors::label_selector(&w.at(s));
        }
        if mutating {
            w.at("reinvocationPolicy").optional_one_of(&["IfNeeded", "Never"]);
        }
        client_config(&w.at("clientConfig"));
        let versions = w.at("admissionReviewVersions");
        if versions.is_empty() {
            versions.required("must specify one of v1, v1beta1");
        } else {
            review_versions(&versions, &["v1", "v1beta1"]);
        }
        match_conditions(&w.at("matchConditions"));
    }
}

fn match_conditions(at: &At<'_>) {
    if at.len() > 64 {
        at.too_many(64);
    }
    let mut seen: Vec<String> = Vec::new();
    for c in at.items() {
        let name = c.at("name");
        if name.require() {
            name.syntax(names::qualified_name);
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
        }
        if c.text("expression").trim().is_empty() {
            c.at("expression").required("");
        }
    }
}

fn rule(r: &At<'_>, subresources: bool) {
    let operations = r.at("operations");
    operations.require();
    let wildcard = |at: &At<'_>| at.items().any(|v| v.str() == "*");
    if operations.len() > 1 && wildcard(&operations) {
        operations.invalid("if '*' is present, must not specify other operations");
    }
    operations.each(|op| op.optional_one_of(&["*", "CONNECT", "CREATE", "DELETE", "UPDATE"]));
    for list in ["apiGroups", "apiVersions"] {
        let at = r.at(list);
        at.require();
        if at.len() > 1 && wildcard(&at) {
            let what = if list == "apiGroups" { "API groups" } else { "API versions" };
            at.invalid(format!("if '*' is present, must not specify other {what}"));
        }
    }
    r.at("apiVersions").each(|v| {
        if v.is_empty() {
            v.required("");
        }
    });
    let resources = r.at("resources");
    resources.require();
    for v in resources.items() {
        if v.is_empty() {
            v.required("");
        } else if !subresources && v.str().contains('/') {
            v.invalid("must not specify subresources");
        }
    }
    if resources.len() > 1 && resources.items().any(|v| v.str() == "*/*") {
        resources.invalid("if '*/*' is present, must not specify other resources");
    }
    r.at("scope").optional_one_of(&["*", "Cluster", "Namespaced"]);
}

// === Admission policies: structure only, expressions are compiled where they are run ===

/// ValidatingAdmissionPolicies.
pub static VALIDATING_POLICY: Rules = Rules {
    defaults: &[|_, o| policy_defaults(o)],
    validate: &[|_, o| {
        let spec = o.at("spec");
        policy(&spec);
        let (checks, audits) = (spec.at("validations"), spec.at("auditAnnotations"));
        if checks.is_empty() && audits.is_empty() {
            let msg = "validations or auditAnnotations must contain at least one item";
            checks.required(msg);
            audits.required(msg);
        }
        for v in checks.items() {
            if v.text("expression").trim().is_empty() {
                v.at("expression").required("expression is not specified");
            }
            v.at("reason").optional_one_of(&["Forbidden", "Invalid", "RequestEntityTooLarge", "Unauthorized"]);
        }
        for a in audits.items() {
            a.at("key").require();
            a.at("valueExpression").require();
        }
    }],
    ..Rules::SPEC_STATUS
};

/// MutatingAdmissionPolicies.
pub static MUTATING_POLICY: Rules = Rules {
    defaults: &[|_, o| policy_defaults(o)],
    validate: &[|_, o| {
        let spec = o.at("spec");
        policy(&spec);
        let mutations = spec.at("mutations");
        if mutations.is_empty() {
            mutations.required("mutations must contain at least one item");
        }
        for m in mutations.items() {
            m.at("patchType").one_of(&["ApplyConfiguration", "JSONPatch"]);
        }
        spec.at("reinvocationPolicy").optional_one_of(&["IfNeeded", "Never"]);
    }],
    ..Rules::SPEC
};

fn policy_defaults(o: &mut Value) {
    if !o["spec"].is_object() {
        return;
    }
    default_text(o, "spec.failurePolicy", "Fail");
    if let Some(m) = super::at::get_mut(o, "spec.matchConstraints").filter(|m| m.is_object()) {
        match_resources_defaults(m);
    }
}

fn match_resources_defaults(m: &mut Value) {
    match_defaults(m);
    for list in ["resourceRules", "excludeResourceRules"] {
        for r in items_mut(m, list) {
            default_text(r, "scope", "*");
        }
    }
}

fn policy(spec: &At<'_>) {
    spec.at("failurePolicy").optional_one_of(&["Fail", "Ignore"]);
    let kind = spec.at("paramKind");
    if kind.present() {
        for f in ["apiVersion", "kind"] {
            kind.at(f).require();
        }
    }
    let constraints = spec.at("matchConstraints");
    if constraints.present() {
        match_resources(&constraints);
        constraints.at("resourceRules").require();
    } else {
        constraints.required("");
    }
    match_conditions(&spec.at("matchConditions"));
    let mut seen: Vec<String> = Vec::new();
    for v in spec.at("variables").items() {
        let name = v.at("name");
        if name.require() {
            name.syntax(names::c_identifier);
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
        }
        v.at("expression").require();
    }
}

fn match_resources(m: &At<'_>) {
    m.at("matchPolicy").optional_one_of(&["Equivalent", "Exact"]);
    for s in ["namespaceSelector", "objectSelector"] {
        selectors::label_selector(&m.at(s));
    }
    for list in ["resourceRules", "excludeResourceRules"] {
        for r in m.at(list).items() {
            rule(&r, true);
        }
    }
}

/// Bindings of both kinds of policies.
pub static POLICY_BINDING: Rules = Rules {
    defaults: &[|_, o| {
        if let Some(m) = super::at::get_mut(o, "spec.matchResources").filter(|m| m.is_object()) {
            match_resources_defaults(m);
        }
    }],
    validate: &[|ctx, o| {
        let spec = o.at("spec");
        if spec.at("policyName").require() {
            spec.at("policyName").syntax(names::dns1123_subdomain);
        }
        let param = spec.at("paramRef");
        if param.present() {
            match (param.text("name").is_empty(), param.has("selector")) {
                (true, false) => param.required("one of name or selector must be specified"),
                (false, true) => param.at("name").forbidden("name and selector are mutually exclusive"),
                (true, true) => selectors::label_selector(&param.at("selector")),
                (false, false) => {}
            }
            param.at("parameterNotFoundAction").one_of(&["Allow", "Deny"]);
        }
        if spec.has("matchResources") {
            match_resources(&spec.at("matchResources"));
        }
        if ctx.resource.plural == "validatingadmissionpolicybindings" {
            let actions = spec.at("validationActions");
            actions.require();
            actions.each(|a| a.one_of(&["Audit", "Deny", "Warn"]));
            let has = |name: &str| actions.items().any(|a| a.str() == name);
            if has("Deny") && has("Warn") {
                actions.invalid("must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)");
            }
        }
    }],
    ..Rules::SPEC
};

// === APIService ===

/// APIServices.
pub static API_SERVICE: Rules = Rules {
    name: names::path_segment,
    unconditional_update: false,
    defaults: &[|_, o| {
        if get(o, "spec.service").is_object() {
            default_at(o, "spec.service.port", 443);
        }
    }],
    validate: &[|_, o| {
        let spec = o.at("spec");
        let (group, version) = (spec.at("group"), spec.at("version"));
        let want = format!("{}.{}", version.str(), group.str());
        if o.text("metadata.name") != want {
            o.at("metadata.name").invalid(format!("must be `spec.version+\".\"+spec.group`: {want:?}"));
        }
        if group.is_empty() {
            if version.str() != "v1" {
                group.required("only v1 may have an empty group and it better be legacy kube");
            }
        } else {
            group.syntax(names::dns1123_subdomain);
        }
        version.syntax(names::dns1035_label);
        for (field, max) in [("groupPriorityMinimum", 20_000), ("versionPriority", 1000)] {
            let n = spec.num(field).unwrap_or(0);
            if n <= 0 || n > max {
                spec.at(field).invalid_value(n, format!("must be positive and less than {max}"));
            }
        }
        let service = spec.at("service");
        let (bundle, insecure) = (spec.at("caBundle"), spec.at("insecureSkipTLSVerify"));
        if !service.present() {
            if !bundle.is_empty() {
                bundle.invalid_value(format!("{} bytes", bundle.str().len()), "local APIServices may not have a caBundle");
            }
            if insecure.value == true {
                insecure.invalid("local APIServices may not have insecureSkipTLSVerify");
            }
            return;
        }
        for f in ["namespace", "name"] {
            service.at(f).require();
        }
        if insecure.value == true && !bundle.is_empty() {
            insecure.invalid("may not be true if caBundle is present");
        }
    }],
    ..Rules::STATUS
};
