//! Jobs and CronJobs.

use serde_json::{Value, json};

use crate::field::ErrorKind;
use crate::meta;
use crate::selector::LabelSelector;
use crate::strategy::at::{At, default_at, default_text, get, get_mut, items, items_mut, same, set, slot, text};
use crate::strategy::pod::{defaults, spec as podspec};
use crate::strategy::rules::Rules;
use crate::strategy::{Context, cron, names, selectors};

const NAME_LABEL: &str = "batch.kubernetes.io/job-name";
const UID_LABEL: &str = "batch.kubernetes.io/controller-uid";
const OLD_NAME_LABEL: &str = "job-name";
const OLD_UID_LABEL: &str = "controller-uid";
/// Largest parallelism of an indexed job.
const MAX_INDEXED_PARALLELISM: i64 = 100_000;
const MAX_FAILED_INDEXES: i64 = 100_000;
const MANY_COMPLETIONS: i64 = 100_000;
const MANY_PARALLELISM: i64 = 10_000;
const MANY_FAILED_INDEXES: i64 = 10_000;

// === Job ===

/// Jobs.
pub static JOB: Rules = Rules {
    defaults: &[|_, o| {
        job_defaults(o);
        default_at(o, "spec.manualSelector", false);
        let labels = get(o, "spec.template.metadata.labels").clone();
        if labels.is_object() && super::at::is_empty(get(o, "metadata.labels")) {
            set(o, "metadata.labels", labels);
        }
    }],
    create: &[|_, o| {
        if get(o, "spec.manualSelector") != true {
            generate_selector(o);
        }
    }],
    validate: &[validate_job],
    validate_update: &[job_update],
    validate_status: &[job_status],
    warnings: &[|o, out| {
        let bad = names::dns1123_label(meta::name(o));
        if !bad.is_empty() {
            out.push(format!(
                "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: [{}]",
                bad.join(" ")
            ));
        }
    }],
    ..Rules::SPEC_STATUS
};

/// Defaults of a job's spec.
fn job_defaults(o: &mut Value) {
    if let Some(t) = get_mut(o, "spec.template") {
        defaults::template(t);
    }
    let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
    if spec["completions"].is_null() && spec["parallelism"].is_null() {
        set(spec, "completions", json!(1));
    }
    default_at(spec, "parallelism", 1);
    let limit = if spec["backoffLimitPerIndex"].is_null() { 6 } else { i64::from(i32::MAX) };
    default_at(spec, "backoffLimit", limit);
    default_at(spec, "completionMode", "NonIndexed");
    default_at(spec, "suspend", false);
    let replacement = if spec["podFailurePolicy"].is_null() { "TerminatingOrFailed" } else { "Failed" };
    default_at(spec, "podReplacementPolicy", replacement);
    for rule in items_mut(spec, "podFailurePolicy.rules") {
        for c in items_mut(rule, "onPodConditions") {
            default_text(c, "status", "True");
        }
    }
}

fn generate_selector(o: &mut Value) {
    let (name, uid) = (meta::name(o).to_owned(), meta::uid(o).to_owned());
    let labels = [(OLD_NAME_LABEL, &name), (NAME_LABEL, &name), (OLD_UID_LABEL, &uid), (UID_LABEL, &uid)];
    let put = |o: &mut Value, path: &str, key: &str, value: &str| {
        if let Some(slot) = slot(o, path) {
            if slot.is_null() {
                *slot = json!({});
            }
            if let Some(map) = slot.as_object_mut() {
                map.entry(key).or_insert_with(|| value.into());
            }
        }
    };
    for (key, value) in labels {
        put(o, "spec.template.metadata.labels", key, value);
    }
    put(o, "spec.selector.matchLabels", UID_LABEL, &uid);
}

fn validate_job(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    generated_selector(o, &spec);
    job_spec(&spec);
    let selector = spec.at("selector");
    if selector.present() {
        selectors::label_selector(&selector);
        let labels = spec.at("template.metadata.labels");
        if let Ok(s) = LabelSelector::from_object(selector.value)
            && !s.matches(|k| labels.value.get(k).and_then(Value::as_str))
        {
            labels.invalid("`selector` does not match template `labels`");
        }
    } else {
        selector.required("");
    }
    let completions = spec.num("completions").unwrap_or(0);
    if spec.text("completionMode") == "Indexed" && completions > 0 {
        let longest = format!("{}-{}", o.text("metadata.name"), completions - 1);
        if !names::dns1123_label(&longest).is_empty() {
            o.at("metadata.name").invalid(format!("will not able to create pod with invalid DNS label: {longest}"));
        }
    }
}

fn generated_selector(o: &At<'_>, spec: &At<'_>) {
    if spec.flag("manualSelector") || !spec.has("selector") {
        return;
    }
    let (name, uid) = (o.text("metadata.name"), o.text("metadata.uid"));
    if uid.is_empty() {
        o.at("metadata.uid").required("");
    }
    let labels = spec.at("template.metadata.labels");
    for (key, want) in [(OLD_UID_LABEL, uid), (OLD_NAME_LABEL, name), (UID_LABEL, uid), (NAME_LABEL, name)] {
        let at = labels.key(key);
        if !at.present() {
            at.required(format!("must be '{want}'"));
        } else if at.str() != want {
            labels.invalid_value(labels.value.clone(), format!("must be '{want}'"));
        }
    }
    let expected = |k: &str| match k {
        UID_LABEL | OLD_UID_LABEL => Some(uid),
        NAME_LABEL | OLD_NAME_LABEL => Some(name),
        _ => None,
    };
    if let Ok(s) = LabelSelector::from_object(spec.at("selector").value)
        && !s.matches(expected)
    {
        spec.at("selector").invalid("`selector` not auto-generated");
    }
}

fn job_spec(spec: &At<'_>) {
    for n in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        spec.at(n).non_negative();
    }
    let per_index = spec.at("backoffLimitPerIndex");
    let failed = spec.at("maxFailedIndexes");
    if failed.present() && !per_index.present() {
        per_index.required("when maxFailedIndexes is specified");
    }
    managed_by(&spec.at("managedBy"));
    let mode = spec.at("completionMode");
    mode.optional_one_of(&["NonIndexed", "Indexed"]);
    if mode.str() == "Indexed" {
        indexed(spec);
    } else if !mode.present() || mode.str() == "NonIndexed" {
        for at in [&per_index, &failed] {
            if at.present() {
                at.invalid("requires indexed completion mode");
            }
        }
    }
    failure_policy(spec);
    let success = spec.at("successPolicy");
    if success.present() {
        if mode.str() == "Indexed" {
            success_policy(&success, spec);
        } else {
            success.invalid("requires indexed completion mode");
        }
    }
    let replacement = spec.at("podReplacementPolicy");
    if spec.has("podFailurePolicy") {
        replacement.optional_one_of(&["Failed"]);
    } else {
        replacement.optional_one_of(&["Failed", "TerminatingOrFailed"]);
    }
    podspec::template(&spec.at("template"));
    let policy = spec.at("template.spec.restartPolicy");
    match policy.str() {
        "Always" | "" => policy.required("valid values: \"OnFailure\", \"Never\""),
        "Never" => {}
        "OnFailure" => {
            if spec.has("podFailurePolicy") {
                policy.invalid("only \"Never\" is supported when podFailurePolicy is specified");
            }
        }
        _ => policy.not_supported(&["OnFailure", "Never"]),
    }
}

fn managed_by(at: &At<'_>) {
    if !at.present() {
        return;
    }
    match at.str().split_once('/') {
        _ if at.is_empty() => at.required(""),
        Some((host, path)) if !host.is_empty() && !path.is_empty() => {
            for msg in names::dns1123_subdomain(host) {
                at.invalid_value(host, msg);
            }
        }
        _ => at.invalid("must be a domain-prefixed path (such as \"acme.io/foo\")"),
    }
    if at.str().len() > 63 {
        at.too_long(63);
    }
}

fn indexed(spec: &At<'_>) {
    let (completions, parallelism, failed) =
        (spec.at("completions"), spec.at("parallelism"), spec.at("maxFailedIndexes"));
    let above = |at: &At<'_>, max: i64| at.int().is_some_and(|n| n > max);
    if !completions.present() {
        completions.required("when completion mode is Indexed");
    }
    if above(&parallelism, MAX_INDEXED_PARALLELISM) {
        parallelism
            .invalid(format!("must be less than or equal to {MAX_INDEXED_PARALLELISM} when completion mode is Indexed"));
    }
    if completions.int().is_some_and(|c| above(&failed, c)) {
        failed.invalid("must be less than or equal to completions");
    }
    if above(&failed, MAX_FAILED_INDEXES) {
        failed.invalid(format!("must be less than or equal to {MAX_FAILED_INDEXES}"));
    }
    if above(&completions, MANY_COMPLETIONS) && spec.has("backoffLimitPerIndex") {
        let detail = |max: i64| {
            format!(
                "must be less than or equal to {max} when completions are above {MANY_COMPLETIONS} and used with backoff limit per index"
            )
        };
        if !failed.present() {
            failed.required(format!("must be specified when completions is above {MANY_COMPLETIONS}"));
        }
        if above(&parallelism, MANY_PARALLELISM) {
            parallelism.invalid(detail(MANY_PARALLELISM));
        }
        if above(&failed, MANY_FAILED_INDEXES) {
            failed.invalid(detail(MANY_FAILED_INDEXES));
        }
    }
}

fn failure_policy(spec: &At<'_>) {
    let rules = spec.at("podFailurePolicy.rules");
    if rules.len() > 20 {
        rules.too_many(20);
    }
    let known: Vec<&str> = ["template.spec.containers", "template.spec.initContainers"]
        .iter()
        .flat_map(|p| items(spec.value, p))
        .map(|c| text(c, "name"))
        .collect();
    for rule in rules.items() {
        let action = rule.at("action");
        match action.str() {
            "" => action.required("valid values: [\"Count\" \"FailIndex\" \"FailJob\" \"Ignore\"]"),
            "FailIndex" if !spec.has("backoffLimitPerIndex") => {
                action.invalid("requires the backoffLimitPerIndex to be set");
            }
            "Count" | "FailIndex" | "FailJob" | "Ignore" => {}
            _ => action.not_supported(&["Count", "FailIndex", "FailJob", "Ignore"]),
        }
        let (codes, conditions) = (rule.at("onExitCodes"), rule.at("onPodConditions"));
        if codes.present() {
            exit_codes(&codes, &known);
        }
        if conditions.len() > 20 {
            conditions.too_many(20);
        }
        for c in conditions.items() {
            c.at("type").syntax(names::qualified_name);
            if c.text("status").is_empty() {
                c.at("status").required("valid values: [\"False\" \"True\" \"Unknown\"]");
            } else {
                c.at("status").one_of(&["False", "True", "Unknown"]);
            }
        }
        match (codes.present(), conditions.is_empty()) {
            (true, false) => rule.error(
                ErrorKind::Invalid,
                None,
                "specifying both OnExitCodes and OnPodConditions is not supported",
            ),
            (false, true) => rule.error(
                ErrorKind::Invalid,
                None,
                "specifying one of OnExitCodes and OnPodConditions is required",
            ),
            _ => {}
        }
    }
}

fn exit_codes(at: &At<'_>, known: &[&str]) {
    let operator = at.at("operator");
    if operator.is_empty() {
        operator.required("valid values: [\"In\" \"NotIn\"]");
    } else {
        operator.one_of(&["In", "NotIn"]);
    }
    let name = at.at("containerName");
    if name.present() && !known.contains(&name.str()) {
        name.invalid("must be one of the container or initContainer names in the pod template");
    }
    let values = at.at("values");
    match values.len() {
        0 => values.invalid_value(values.value.clone(), "at least one value is required"),
        1..=255 => {}
        _ => values.too_many(255),
    }
    let (mut seen, mut ordered, mut last): (Vec<i64>, bool, Option<i64>) = (Vec::new(), true, None);
    for v in values.items() {
        let n = v.int().unwrap_or(0);
        if operator.str() == "In" && n == 0 {
            v.invalid("must not be 0 for the In operator");
        }
        if seen.contains(&n) {
            v.duplicate();
        }
        seen.push(n);
        ordered &= last.is_none_or(|l| l <= n);
        last = Some(n);
    }
    if !ordered {
        values.invalid("must be ordered");
    }
}

fn success_policy(at: &At<'_>, spec: &At<'_>) {
    let rules = at.at("rules");
    if rules.is_empty() {
        rules.required("at least one rules must be specified when the successPolicy is specified");
    }
    if rules.len() > 20 {
        rules.too_many(20);
    }
    let completions = spec.num("completions").unwrap_or(0);
    for rule in rules.items() {
        let (count, indexes) = (rule.at("succeededCount"), rule.at("succeededIndexes"));
        if !count.present() && !indexes.present() {
            rule.required("at least one of succeededCount or succeededIndexes must be specified");
        }
        let mut total = completions;
        if indexes.present() {
            if indexes.str().len() > 64 * 1024 {
                indexes.too_long(64 * 1024);
            }
            match index_count(indexes.str(), completions) {
                Ok(n) => total = n,
                Err(e) => indexes.invalid(format!("error parsing succeededIndexes: {e}")),
            }
        }
        count.non_negative();
        if let Some(n) = count.int() {
            if n > completions {
                count.invalid(format!("must be less than or equal to {completions} (the number of specified completions)"));
            }
            if indexes.present() && n > total {
                count.invalid(format!(
                    "must be less than or equal to {total} (the number of indexes in the specified succeededIndexes field)"
                ));
            }
        }
    }
}

/// Number of indexes in `1,3-5`; increasing, below `completions`.
fn index_count(text: &str, completions: i64) -> Result<i64, String> {
    let (mut total, mut last) = (0, -1);
    if text.is_empty() {
        return Ok(0);
    }
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let number = |s: &str| {
            s.parse::<i64>().map_err(|_| format!("cannot convert string to integer for index: {s:?}"))
        };
        let (a, b) = (number(a)?, number(b)?);
        if b >= completions || a >= completions {
            return Err(format!("too large index: {part:?}"));
        }
        if a <= last {
            return Err(format!("non-increasing order, previous: {last}, current: {a}"));
        }
        if b < a {
            return Err(format!("non-increasing order, previous: {a}, current: {b}"));
        }
        total += b - a + 1;
        last = b;
    }
    Ok(total)
}

fn condition(o: &Value, kind: &str) -> bool {
    items(o, "status.conditions").iter().any(|c| text(c, "type") == kind && text(c, "status") == "True")
}

fn job_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let spec = o.at("spec");
    let old_spec = get(old, "spec");
    completions_update(&spec, old_spec);
    for field in
        ["selector", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy", "successPolicy"]
    {
        spec.at(field).immutable(&old_spec[field]);
    }
    // While it is suspended and nothing runs, where its pods go and what they ask for may change.
    let suspended = old_spec["suspend"] == true
        && (get(old, "status.startTime").is_null() || condition(old, "Suspended"))
        && get(old, "status.active").as_i64().unwrap_or(0) == 0;
    let mut was = old_spec["template"].clone();
    if suspended {
        let new = &spec.value["template"];
        for field in [
            "metadata.labels",
            "metadata.annotations",
            "spec.nodeSelector",
            "spec.tolerations",
            "spec.schedulingGates",
            "spec.affinity.nodeAffinity",
        ] {
            let v = get(new, field).clone();
            if !v.is_null() || !get(&was, field).is_null() {
                set(&mut was, field, v);
            }
        }
        for list in ["spec.containers", "spec.initContainers"] {
            for (to, from) in items_mut(&mut was, list).zip(items(new, list)) {
                if text(to, "name") == text(from, "name") {
                    set(to, "resources", from["resources"].clone());
                }
            }
        }
    }
    if !same(&spec.value["template"], &was) {
        spec.at("template").invalid("field is immutable");
    }
}

/// Completions of an indexed job may change together with parallelism.
fn completions_update(spec: &At<'_>, old: &Value) {
    let at = spec.at("completions");
    if same(at.value, &old["completions"]) {
        return;
    }
    if spec.text("completionMode") != "Indexed" {
        return at.invalid("field is immutable");
    }
    let number = |v: &Value| v.as_i64().unwrap_or(0);
    if number(at.value) != number(&spec.value["parallelism"]) || number(&old["completions"]) != number(&old["parallelism"]) {
        at.invalid("can only be modified in tandem with parallelism");
    }
}

fn job_status(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let status = o.at("status");
    for n in ["active", "succeeded", "failed", "ready", "terminating"] {
        status.at(n).non_negative();
    }
    let has = |kind: &str| condition(o.value, kind);
    let conditions = status.at("conditions");
    let invalid = |msg: &str| conditions.error(ErrorKind::Invalid, None, msg);
    if has("Complete") && has("Failed") {
        invalid("cannot set Complete=True and Failed=true conditions");
    }
    if has("Complete") && has("FailureTarget") {
        invalid("cannot set Complete=True and FailureTarget=true conditions");
    }
    let finished = has("Complete") || has("Failed");
    if status.has("completionTime") && !has("Complete") && get(old, "status.completionTime").is_null() {
        status.at("completionTime").invalid("cannot set completionTime when there is no Complete=True condition");
    }
    if has("Complete") && !status.has("completionTime") && !condition(old, "Complete") {
        status.at("completionTime").required("completionTime is required for Complete jobs");
    }
    if finished && status.num("active").unwrap_or(0) > 0 {
        status.at("active").invalid("active>0 is invalid for finished job");
    }
    if status.num("ready").unwrap_or(0) > status.num("active").unwrap_or(0) && status.has("ready") {
        let was = get(old, "status.ready").as_i64().unwrap_or(0) > get(old, "status.active").as_i64().unwrap_or(0);
        if !was {
            status.at("ready").invalid("cannot set more ready pods than active");
        }
    }
    for kind in ["Failed", "Complete", "FailureTarget"] {
        if condition(old, kind) && !has(kind) {
            invalid(&format!("cannot disable the terminal {kind}=True condition"));
        }
    }
    if has("SuccessCriteriaMet") && has("Failed") {
        invalid("cannot set SuccessCriteriaMet=True and Failed=true conditions");
    }
    if condition(old, "SuccessCriteriaMet") && !has("SuccessCriteriaMet") {
        invalid("cannot disable the SuccessCriteriaMet=True condition");
    }
    for counter in ["failed", "succeeded"] {
        let was = get(old, &format!("status.{counter}")).as_i64().unwrap_or(0);
        if status.num(counter).unwrap_or(0) < was {
            status.at(counter).invalid_value(
                status.num(counter).unwrap_or(0),
                format!("cannot decrease the {counter} counter"),
            );
        }
    }
    let was = get(old, "status.completionTime");
    if status.has("completionTime") && !was.is_null() && status.at("completionTime").value != was {
        status.at("completionTime").invalid("field is immutable");
    }
}

// === CronJob ===

/// CronJobs.
pub static CRON_JOB: Rules = Rules {
    defaults: &[|_, o| {
        // Of the job that will be made only the pod has its defaults yet.
        if let Some(t) = get_mut(o, "spec.jobTemplate.spec.template") {
            defaults::template(t);
        }
        let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
        default_text(spec, "concurrencyPolicy", "Allow");
        default_at(spec, "suspend", false);
        default_at(spec, "successfulJobsHistoryLimit", 3);
        default_at(spec, "failedJobsHistoryLimit", 1);
    }],
    validate: &[cron_job],
    ..Rules::SPEC_STATUS
};

fn cron_job(_: &Context<'_>, o: &At<'_>) {
    let name = o.at("metadata.name");
    if name.str().len() > 52 && !o.has("metadata.resourceVersion") {
        name.invalid("must be no more than 52 characters");
    }
    let spec = o.at("spec");
    let schedule = spec.at("schedule");
    if schedule.is_empty() {
        schedule.required("");
    } else {
        if schedule.str().contains("TZ") {
            schedule.invalid("cannot use TZ or CRON_TZ in schedule, use timeZone field instead");
        } else if let Err(e) = cron::parse(schedule.str()) {
            schedule.invalid(e);
        }
    }
    time_zone(&spec.at("timeZone"));
    for n in ["startingDeadlineSeconds", "successfulJobsHistoryLimit", "failedJobsHistoryLimit"] {
        spec.at(n).non_negative();
    }
    spec.at("concurrencyPolicy").one_of(&["Allow", "Forbid", "Replace"]);
    let template = spec.at("jobTemplate");
    let job = template.at("spec");
    job_spec(&job);
    if job.flag("manualSelector") {
        job.at("manualSelector").not_supported(&["nil", "false"]);
    }
}

fn time_zone(at: &At<'_>) {
    if !at.present() {
        return;
    }
    if at.is_empty() {
        return at.invalid("timeZone must be nil or non-empty string");
    }
    if at.str().eq_ignore_ascii_case("Local") {
        return at.invalid("timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones");
    }
    // Whether the zone exists is for the controller to find out: this crate reads no zone database.
    let plausible = at.str().split('/').all(|p| {
        !p.is_empty()
            && p.len() <= 14
            && p.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'+'))
    });
    if !plausible {
        at.invalid(format!("unknown time zone {}", at.str()));
    }
}
