//! Volumes and what drives them: PersistentVolume, PersistentVolumeClaim, StorageClass, CSI kinds, VolumeAttachment.

use serde_json::{Value, json};

use crate::field::ErrorKind;
use crate::meta;
use crate::strategy::at::{At, default_at, default_text, get, items, same, set, text};
use crate::strategy::pod::volumes;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, resources, selectors};

const ACCESS_MODES: [&str; 4] = ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
const VOLUME_MODES: [&str; 2] = ["Block", "Filesystem"];
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
const PARAMETERS_MAX: usize = 512;
const PARAMETERS_BYTES: usize = 256 * 1024;

/// `spec.accessModes` of volumes and claims.
fn access_modes(at: &At<'_>, detail: &str) {
    if at.is_empty() {
        at.required(detail);
    }
    let modes: Vec<&str> = at.value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for m in modes.iter().filter(|m| !ACCESS_MODES.contains(m)) {
        let value = Value::from(*m);
        at.with(&value).not_supported(&ACCESS_MODES);
    }
    if modes.contains(&"ReadWriteOncePod") && modes.iter().any(|m| *m != "ReadWriteOncePod" && ACCESS_MODES.contains(m)) {
        at.forbidden("may not use ReadWriteOncePod with other access modes");
    }
}

fn positive_quantity(at: &At<'_>) {
    match resources::quantity(at.value) {
        None => at.invalid("must be a quantity"),
        Some(q) if q.is_negative() || q.is_zero() => at.invalid("must be greater than zero"),
        Some(_) => {}
    }
}

/// A CSI driver's name.
pub fn csi_driver_name(at: &At<'_>) {
    if at.is_empty() {
        at.required("");
    }
    if at.str().len() > 63 {
        at.too_long(63);
    }
    for msg in names::dns1123_subdomain(&at.str().to_lowercase()) {
        at.invalid_value(at.str(), msg);
    }
}

// === PersistentVolumeClaim ===

/// PersistentVolumeClaims.
pub static CLAIM: Rules = Rules {
    defaults: &[|_, o| {
        if let Some(spec) = o.get_mut("spec") {
            default_at(spec, "volumeMode", "Filesystem");
        }
        if o["status"].is_object() {
            default_text(o, "status.phase", "Pending");
        }
    }],
    create: &[|_, o| {
        set(o, "status", json!({"phase": "Pending"}));
        drop_other_sources(o);
        normalize_sources(o);
    }],
    update: &[|_, o, _| normalize_sources(o)],
    validate: &[|_, o| claim_spec(&o.at("spec"))],
    validate_update: &[claim_update],
    validate_status: &[claim_status],
    ..Rules::STATUS
};

/// Kinds that only `dataSourceRef` may have.
fn drop_other_sources(claim: &mut Value) {
    let given = get(claim, "spec.dataSource");
    let known = text(given, "apiGroup").is_empty() && text(given, "kind") == "PersistentVolumeClaim"
        || text(given, "kind") == "VolumeSnapshot" && text(given, "apiGroup") == "snapshot.storage.k8s.io";
    if !given.is_null() && !known {
        super::at::remove(claim, "spec.dataSource");
    }
}

/// `dataSource` and `dataSourceRef` say the same, whichever was given.
fn normalize_sources(claim: &mut Value) {
    let (source, reference) = (get(claim, "spec.dataSource").clone(), get(claim, "spec.dataSourceRef").clone());
    let core = text(&source, "apiGroup").is_empty() && text(&source, "kind") == "PersistentVolumeClaim"
        || text(&source, "kind") == "VolumeSnapshot" && text(&source, "apiGroup") == "snapshot.storage.k8s.io";
    if !source.is_null() && reference.is_null() && core {
        set(claim, "spec.dataSourceRef", source);
    } else if source.is_null() && !reference.is_null() && text(&reference, "namespace").is_empty() {
        let core = text(&reference, "apiGroup").is_empty() && text(&reference, "kind") == "PersistentVolumeClaim"
            || text(&reference, "kind") == "VolumeSnapshot" && text(&reference, "apiGroup") == "snapshot.storage.k8s.io";
        if core {
            set(claim, "spec.dataSource", reference);
        }
    }
}

fn data_source(at: &At<'_>) {
    if !at.present() {
        return;
    }
    volumes::needs(at, &["name", "kind"]);
    let group = at.at("apiGroup");
    if group.is_empty() {
        if at.text("kind") != "PersistentVolumeClaim" {
            at.invalid_value(at.text("kind"), "must be 'PersistentVolumeClaim' when referencing the default apiGroup");
        }
    } else {
        group.syntax(names::dns1123_subdomain);
    }
    let ns = at.at("namespace");
    if !ns.is_empty() {
        ns.syntax(names::dns1123_label);
    }
}

/// A claim's spec, also in templates.
pub fn claim_spec(spec: &At<'_>) {
    access_modes(&spec.at("accessModes"), "at least 1 access mode is required");
    selectors::label_selector(&spec.at("selector"));
    let size = spec.at("resources.requests");
    let size = size.key("storage");
    let resources_at = spec.at("resources");
    let shown = resources_at.key("storage");
    let shown = shown.with(size.value);
    if shown.present() {
        positive_quantity(&shown);
    } else {
        shown.required("");
    }
    for class in ["storageClassName", "volumeAttributesClassName"] {
        let at = spec.at(class);
        if !at.is_empty() {
            at.syntax(names::dns1123_subdomain);
        }
    }
    spec.at("volumeMode").optional_one_of(&VOLUME_MODES);
    let (source, reference) = (spec.at("dataSource"), spec.at("dataSourceRef"));
    data_source(&source);
    data_source(&reference);
    if source.present() && reference.present() {
        let equal = ["apiGroup", "kind", "name"].iter().all(|f| source.text(f) == reference.text(f));
        if !reference.text("namespace").is_empty() {
            spec.invalid_value("dataSource", "may not be specified when dataSourceRef.namespace is specified");
        } else if !equal {
            spec.invalid_value("dataSource", "must match dataSourceRef");
        }
    }
}

fn claim_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let bound = o.text("status.phase") == "Bound";
    let mut copy = o.at("spec").value.clone();
    let old_spec = get(old, "spec");
    if text(old_spec, "volumeName").is_empty() {
        super::at::remove(&mut copy, "volumeName");
    }
    let (new_class, old_class) = (get(o.value, "spec.storageClassName"), get(old_spec, "storageClassName"));
    let annotation = |v: &Value| meta::annotation(v, CLASS_ANNOTATION).map(str::to_owned);
    let was = annotation(old);
    let upgraded = old_class.is_null() && !new_class.is_null() && (was.is_none() || was.as_deref() == new_class.as_str());
    if upgraded {
        super::at::remove(&mut copy, "storageClassName");
    } else if annotation(o.value) != was {
        o.at("metadata.annotations")
            .key(CLASS_ANNOTATION)
            .invalid_value(annotation(o.value).unwrap_or_default(), "field is immutable");
    }
    if bound {
        let size = get(old_spec, "resources.requests.storage").clone();
        set(&mut copy, "resources.requests.storage", size);
        match get(old_spec, "volumeAttributesClassName") {
            Value::Null => {
                super::at::remove(&mut copy, "volumeAttributesClassName");
            }
            v => set(&mut copy, "volumeAttributesClassName", v.clone()),
        }
    }
    if !same(&copy, old_spec) {
        o.at("spec").forbidden(
            "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims",
        );
    }
    let size = |v: &Value, path: &str| resources::quantity(get(v, path));
    let (new_size, old_size) =
        (size(o.value, "spec.resources.requests.storage"), size(old, "spec.resources.requests.storage"));
    if let (Some(new_size), Some(old_size)) = (new_size, old_size)
        && new_size < old_size
        && size(old, "status.capacity.storage").is_some_and(|has| new_size <= has)
    {
        o.at("spec.resources.requests.storage").forbidden("field can not be less than status.capacity");
    }
    let mode = o.at("spec.volumeMode");
    if !same(mode.value, get(old_spec, "volumeMode")) {
        o.at("volumeMode").invalid_value(mode.value.clone(), "field is immutable");
    }
}

fn claim_status(_: &Context<'_>, o: &At<'_>, _: &Value) {
    const RESIZE: [&str; 5] = [
        "ControllerResizeInProgress",
        "ControllerResizeInfeasible",
        "NodeResizeInProgress",
        "NodeResizeInfeasible",
        "NodeResizePending",
    ];
    for (name, amount) in o.at("status.capacity").entries() {
        resources::value(&amount, name);
    }
    for (name, amount) in o.at("status.allocatedResources").entries() {
        resources::value(&amount, name);
    }
    for (_, state) in o.at("status.allocatedResourceStatuses").entries() {
        state.optional_one_of(&RESIZE);
    }
}

// === PersistentVolume ===

/// PersistentVolumes.
pub static VOLUME: Rules = Rules {
    defaults: &[|_, o| {
        if let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) {
            default_text(spec, "persistentVolumeReclaimPolicy", "Retain");
            default_text(spec, "volumeMode", "Filesystem");
            volume_source_defaults(spec);
        }
        if o["status"].is_object() {
            default_text(o, "status.phase", "Pending");
        }
    }],
    create: &[|ctx, o| {
        let now = meta::now_rfc3339(ctx.now);
        set(o, "status", json!({"phase": "Pending", "lastPhaseTransitionTime": now}));
    }],
    status_update: &[|ctx, new, old| {
        if text(new, "status.phase") != text(old, "status.phase") {
            let now = meta::now_rfc3339(ctx.now);
            let given = get(new, "status.lastPhaseTransitionTime");
            if given.is_null() || same(given, get(old, "status.lastPhaseTransitionTime")) {
                set(new, "status.lastPhaseTransitionTime", now.into());
            }
        }
    }],
    validate: &[|_, o| volume_spec(&o.at("spec"), false)],
    validate_update: &[volume_update],
    ..Rules::STATUS
};

fn volume_source_defaults(spec: &mut Value) {
    if let Some(h) = spec.get_mut("hostPath").filter(|h| h.is_object()) {
        default_at(h, "type", "");
    }
    if let Some(i) = spec.get_mut("iscsi").filter(|i| i.is_object()) {
        default_text(i, "iscsiInterface", "default");
    }
}

type Check = fn(&At<'_>);

/// A volume's sources with their checks.
const SOURCES: &[(&str, Check)] = &[
    ("hostPath", volumes::host_path),
    ("local", |s| {
        s.at("path").require();
        volumes::no_backsteps(&s.at("path"));
    }),
    ("nfs", volumes::nfs),
    ("iscsi", volumes::iscsi),
    ("fc", volumes::fc),
    ("csi", csi_source),
    ("gcePersistentDisk", |s| volumes::needs(s, &["pdName"])),
    ("awsElasticBlockStore", |s| volumes::needs(s, &["volumeID"])),
    ("glusterfs", |s| volumes::needs(s, &["endpoints", "path"])),
    ("flocker", |_| {}),
    ("rbd", |s| volumes::needs(s, &["monitors", "image"])),
    ("quobyte", |s| volumes::needs(s, &["registry", "volume"])),
    ("cephfs", |s| volumes::needs(s, &["monitors"])),
    ("azureFile", |s| volumes::needs(s, &["secretName", "shareName"])),
    ("vsphereVolume", |s| volumes::needs(s, &["volumePath"])),
    ("photonPersistentDisk", |s| volumes::needs(s, &["pdID"])),
    ("portworxVolume", |s| volumes::needs(s, &["volumeID"])),
    ("azureDisk", |s| volumes::needs(s, &["diskName", "diskURI"])),
    ("scaleIO", |s| volumes::needs(s, &["gateway", "system", "volumeName"])),
    ("storageos", |_| {}),
    ("cinder", |s| volumes::needs(s, &["volumeID"])),
    ("flexVolume", |s| volumes::needs(s, &["driver"])),
];

fn csi_source(s: &At<'_>) {
    csi_driver_name(&s.at("driver"));
    s.at("volumeHandle").require();
    const SECRETS: [&str; 4] =
        ["controllerPublishSecretRef", "controllerExpandSecretRef", "nodePublishSecretRef", "nodeExpandSecretRef"];
    for r in SECRETS {
        let r = s.at(r);
        if !r.present() {
            continue;
        }
        if r.at("name").require() {
            r.at("name").syntax(names::dns1123_subdomain);
        }
        if r.at("namespace").require() {
            r.at("namespace").syntax(names::dns1123_label);
        }
    }
}

/// A volume's spec; `inline` in a VolumeAttachment.
fn volume_spec(spec: &At<'_>, inline: bool) {
    const INLINE: &str = "may not be specified in the context of inline volumes";
    access_modes(&spec.at("accessModes"), "");
    let capacity = spec.at("capacity");
    if inline {
        for field in ["claimRef", "capacity"] {
            if !spec.at(field).is_empty() {
                spec.at(field).forbidden(INLINE);
            }
        }
        if !spec.has("csi") {
            spec.at("csi").required("has to be specified in the context of inline volumes");
        }
    } else {
        if capacity.is_empty() {
            capacity.required("");
        }
        if capacity.key("storage").value.is_null() || capacity.len() > 1 {
            capacity.error(
                ErrorKind::NotSupported,
                Some(capacity.value.clone()),
                "supported values: \"storage\"",
            );
        }
        for (_, amount) in capacity.entries() {
            positive_quantity(&amount);
        }
        spec.at("persistentVolumeReclaimPolicy").optional_one_of(&["Delete", "Recycle", "Retain"]);
        spec.at("volumeMode").optional_one_of(&VOLUME_MODES);
    }
    let affinity = spec.at("nodeAffinity");
    if affinity.present() {
        let required = affinity.at("required");
        if required.present() {
            selectors::node_selector(&required);
        } else {
            required.required("must specify required node constraints");
        }
    }
    let mut count = 0;
    for (name, check) in SOURCES {
        let source = spec.at(name);
        if !source.present() {
            continue;
        }
        count += 1;
        if count > 1 {
            source.forbidden("may not specify more than 1 volume type");
        } else {
            check(&source);
        }
    }
    if count == 0 {
        spec.required("must specify a volume type");
    }
    if spec.has("local") && !affinity.present() {
        affinity.required("Local volume requires node affinity");
    }
    if spec.text("hostPath.path") == "/" && spec.text("persistentVolumeReclaimPolicy") == "Recycle" {
        spec.at("persistentVolumeReclaimPolicy").forbidden("may not be 'recycle' for a hostPath mount of '/'");
    }
    let class = spec.at("storageClassName");
    if !class.is_empty() {
        class.syntax(names::dns1123_subdomain);
    }
    let attributes = spec.at("volumeAttributesClassName");
    if attributes.present() {
        if attributes.is_empty() {
            attributes.required("an empty string is disallowed");
        } else {
            attributes.syntax(names::dns1123_subdomain);
        }
        if !spec.has("csi") {
            spec.at("csi").required("has to be specified when using volumeAttributesClassName");
        }
    }
}

fn volume_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let old_spec = get(old, "spec");
    let changed = SOURCES.iter().any(|(name, _)| {
        let (new, was) = (get(o.value, "spec").get(name).unwrap_or(&Value::Null), &old_spec[*name]);
        let mut new = new.clone();
        if *name == "csi" && !was.is_null() && was["controllerExpandSecretRef"].is_null() {
            super::at::remove(&mut new, "controllerExpandSecretRef");
        }
        !same(&new, was)
    });
    if changed {
        o.at("spec.persistentvolumesource").forbidden("spec.persistentvolumesource is immutable after creation");
    }
    let mode = o.at("spec.volumeMode");
    if !same(mode.value, get(old_spec, "volumeMode")) {
        o.at("volumeMode").invalid_value(mode.value.clone(), "field is immutable");
    }
    let class = o.at("spec.volumeAttributesClassName");
    if !class.present() && !get(old_spec, "volumeAttributesClassName").is_null() {
        class.forbidden("update from non-nil value to nil is forbidden");
    }
}

// === storage.k8s.io ===

/// StorageClasses.
pub static CLASS: Rules = Rules {
    defaults: &[|_, o| {
        default_at(o, "reclaimPolicy", "Delete");
        default_at(o, "volumeBindingMode", "Immediate");
    }],
    validate: &[|_, o| {
        provisioner(&o.at("provisioner"));
        parameters(&o.at("parameters"), true);
        let policy = o.at("reclaimPolicy");
        if !policy.is_empty() {
            policy.one_of(&["Delete", "Retain"]);
        }
        o.at("volumeBindingMode").one_of(&["Immediate", "WaitForFirstConsumer"]);
        for term in o.at("allowedTopologies").items() {
            let expressions = term.at("matchLabelExpressions");
            let mut keys: Vec<String> = Vec::new();
            for r in expressions.items() {
                let (key, values) = (r.at("key"), r.at("values"));
                values.require();
                let list = items(r.value, "values");
                for (i, v) in values.items().enumerate() {
                    if list[..i].contains(v.value) {
                        v.duplicate();
                    }
                }
                key.syntax(names::qualified_name);
                if keys.iter().any(|k| k == key.str()) {
                    key.duplicate();
                }
                keys.push(key.str().to_owned());
            }
        }
    }],
    validate_update: &[|_, o, old| {
        for field in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
            o.at(field).immutable(&old[field]);
        }
    }],
    ..Rules::PLAIN
};

fn provisioner(at: &At<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    for msg in names::qualified_name(&at.str().to_lowercase()) {
        at.invalid(msg);
    }
}

fn parameters(at: &At<'_>, allow_empty: bool) {
    if at.len() > PARAMETERS_MAX {
        at.too_long(PARAMETERS_MAX);
    }
    let mut size = 0;
    for (k, v) in at.entries() {
        if k.is_empty() {
            at.invalid_value("", "field can not be empty.");
        }
        size += k.len() + v.str().len();
    }
    if size > PARAMETERS_BYTES {
        at.too_long(PARAMETERS_BYTES);
    }
    if !allow_empty && at.is_empty() {
        at.required("must contain at least one key/value pair");
    }
}

/// VolumeAttributesClasses.
pub static ATTRIBUTES_CLASS: Rules = Rules {
    validate: &[|_, o| {
        provisioner(&o.at("driverName"));
        parameters(&o.at("parameters"), false);
    }],
    validate_update: &[|_, o, old| {
        for field in ["driverName", "parameters"] {
            if !same(o.at(field).value, &old[field]) {
                o.at(field).forbidden(format!("updates to {field} are forbidden."));
            }
        }
    }],
    ..Rules::PLAIN
};

/// VolumeAttachments.
pub static ATTACHMENT: Rules = Rules {
    create: &[|_, o| set(o, "status", json!({"attached": false}))],
    validate: &[attachment],
    validate_update: &[|_, o, old| o.at("spec").immutable(&old["spec"])],
    ..Rules::STATUS
};

fn attachment(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    csi_driver_name(&spec.at("attacher"));
    spec.at("nodeName").syntax(names::dns1123_subdomain);
    let source = spec.at("source");
    let (inline, by_name) = (source.at("inlineVolumeSpec"), source.at("persistentVolumeName"));
    const ONE: &str = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    match (inline.present(), by_name.present()) {
        (false, false) => source.required(ONE),
        (true, true) => source.forbidden(ONE),
        (false, true) if by_name.is_empty() => by_name.required("must specify non empty persistentVolumeName"),
        (false, true) => by_name.syntax(names::dns1123_subdomain),
        (true, false) => volume_spec(&inline, true),
    }
}

/// CSIDrivers.
pub static CSI_DRIVER: Rules = Rules {
    generation: &["spec.tokenRequests", "spec.requiresRepublish", "spec.serviceAccountTokenInSecrets"],
    // The first change counts from nothing.
    create: &[|_, o| {
        super::at::remove(o, "metadata.generation");
    }],
    defaults: &[|_, o| {
        for (field, value) in [
            ("spec.attachRequired", json!(true)),
            ("spec.podInfoOnMount", json!(false)),
            ("spec.storageCapacity", json!(false)),
            ("spec.fsGroupPolicy", json!("ReadWriteOnceWithFSType")),
            ("spec.volumeLifecycleModes", json!(["Persistent"])),
            ("spec.requiresRepublish", json!(false)),
            ("spec.seLinuxMount", json!(false)),
            ("spec.preventPodSchedulingIfMissing", json!(false)),
        ] {
            default_at(o, field, value);
        }
    }],
    validate: &[|_, o| {
        let spec = o.at("spec");
        spec.at("fsGroupPolicy").optional_one_of(&["File", "None", "ReadWriteOnceWithFSType"]);
        let mut seen: Vec<String> = Vec::new();
        for t in spec.at("tokenRequests").items() {
            let audience = t.text("audience").to_owned();
            if seen.contains(&audience) {
                t.at("audience").error(ErrorKind::Duplicate, Some(audience.into()), "");
                continue;
            }
            seen.push(audience);
            let seconds = t.at("expirationSeconds");
            match seconds.int() {
                Some(n) if n < 600 => seconds.invalid("may not specify a duration less than 10 minutes"),
                Some(n) if n > 1 << 32 => seconds.invalid("may not specify a duration larger than 2^32 seconds"),
                _ => {}
            }
        }
        for m in items(o.value, "spec.volumeLifecycleModes") {
            spec.at("volumeLifecycleModes").with(m).optional_one_of(&["Persistent", "Ephemeral"]);
        }
    }],
    validate_update: &[|_, o, old| {
        o.at("spec.attachedRequired").with(get(o.value, "spec.attachRequired")).immutable(get(old, "spec.attachRequired"));
        o.at("spec.volumeLifecycleModes").immutable(get(old, "spec.volumeLifecycleModes"));
    }],
    ..Rules::PLAIN
};

/// CSINodes.
pub static CSI_NODE: Rules = Rules {
    validate: &[|_, o| {
        let mut seen: Vec<String> = Vec::new();
        for d in o.at("spec.drivers").items() {
            let (name, id) = (d.at("name"), d.at("nodeID"));
            csi_driver_name(&name);
            id.require();
            if id.str().len() > 192 {
                id.invalid("must be 192 characters or less");
            }
            d.at("allocatable.count").non_negative();
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
            for key in d.at("topologyKeys").items() {
                for msg in names::qualified_name(key.str()) {
                    d.invalid_value(key.str(), msg);
                }
            }
        }
    }],
    validate_update: &[|_, o, old| {
        let drop_count = |d: &Value| {
            let mut d = d.clone();
            super::at::remove(&mut d, "allocatable");
            d
        };
        for was in items(old, "spec.drivers") {
            for d in o.at("spec.drivers").items() {
                if d.text("name") == text(was, "name") && !same(&drop_count(d.value), &drop_count(was)) {
                    o.at("spec.drivers").invalid_value(d.value.clone(), "field is immutable");
                }
            }
        }
    }],
    ..Rules::PLAIN
};

/// CSIStorageCapacities.
pub static CSI_CAPACITY: Rules = Rules {
    validate: &[|_, o| {
        selectors::label_selector(&o.at("nodeTopology"));
        o.at("storageClassName").syntax(names::dns1123_subdomain);
        let capacity = o.at("capacity");
        if resources::quantity(capacity.value).is_some_and(|q| q.is_negative()) {
            capacity.invalid("must be greater than or equal to 0");
        }
    }],
    validate_update: &[|_, o, old| {
        for field in ["nodeTopology", "storageClassName"] {
            o.at(field).immutable(&old[field]);
        }
    }],
    ..Rules::PLAIN
};
