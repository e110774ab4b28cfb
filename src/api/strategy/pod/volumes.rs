//! `spec.volumes`, and the sources that volumes of pods and PersistentVolumes share.

use crate::strategy::at::At;
use crate::strategy::names;
use crate::strategy::pod::containers::{field_ref, resource_ref};
use crate::strategy::resources;
use crate::strategy::{selectors, storage};

const FILE_MODE_MSG: &str =
    "must be a number between 0 and 0777 (octal), both inclusive";
const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
/// Paths a downward API volume may name.
const DOWNWARD_PATHS: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// Checks all volumes; returns the names of the good ones with the field of their source.
pub fn validate<'v>(at: &'v At<'_>, pod_name: &str) -> Vec<(&'v str, &'v str)> {
    let mut out: Vec<(&str, &str)> = Vec::new();
    let claims_made: Vec<String> = at
        .items()
        .filter(|v| v.has("ephemeral") && !pod_name.is_empty())
        .map(|v| format!("{pod_name}-{}", v.text("name")))
        .collect();
    let list = at.value.as_array().map_or(&[][..], Vec::as_slice);
    for (v, raw) in at.items().zip(list) {
        let before = at.reported();
        let source = sources(&v);
        let name = v.at("name");
        if name.is_empty() {
            name.required("");
        } else {
            name.syntax(names::dns1123_label);
        }
        let name_text = raw.get("name").and_then(|n| n.as_str()).unwrap_or("");
        if out.iter().any(|(n, _)| *n == name_text) {
            name.duplicate();
        }
        if at.reported() == before {
            let source = raw
                .as_object()
                .and_then(|m| m.keys().find(|k| Some(k.as_str()) == source))
                .map_or("", String::as_str);
            out.push((name_text, source));
        }
        let claim = v.at("persistentVolumeClaim.claimName");
        if claims_made.iter().any(|c| c == claim.str()) {
            claim.invalid("must not reference a PVC that gets created for an ephemeral volume");
        }
    }
    out
}

/// A source of a volume and its checks.
type Source = (&'static str, fn(&At<'_>));

const SOURCES: &[Source] = &[
    ("emptyDir", empty_dir),
    ("hostPath", host_path),
    ("gitRepo", git_repo),
    ("gcePersistentDisk", |s| needs(s, &["pdName"])),
    ("awsElasticBlockStore", |s| needs(s, &["volumeID"])),
    ("secret", secret),
    ("nfs", nfs),
    ("iscsi", iscsi),
    ("glusterfs", |s| needs(s, &["endpoints", "path"])),
    ("flocker", |_| {}),
    ("persistentVolumeClaim", |s| needs(s, &["claimName"])),
    ("rbd", |s| needs(s, &["monitors", "image"])),
    ("cinder", |s| needs(s, &["volumeID"])),
    ("cephfs", |s| needs(s, &["monitors"])),
    ("quobyte", |s| needs(s, &["registry", "volume"])),
    ("downwardAPI", downward),
    ("fc", fc),
    ("flexVolume", |s| needs(s, &["driver"])),
    ("configMap", config_map),
    ("azureFile", |s| needs(s, &["secretName", "shareName"])),
    ("vsphereVolume", |s| needs(s, &["volumePath"])),
    ("photonPersistentDisk", |s| needs(s, &["pdID"])),
    ("portworxVolume", |s| needs(s, &["volumeID"])),
    ("azureDisk", |s| needs(s, &["diskName", "diskURI"])),
    ("storageos", |_| {}),
    ("projected", projected),
    ("scaleIO", |s| needs(s, &["gateway", "system", "volumeName"])),
    ("csi", csi),
    ("ephemeral", ephemeral),
    ("image", |s| needs(s, &["reference"])),
];

/// Checks the one source; more or none is an error. Returns its field.
fn sources(v: &At<'_>) -> Option<&'static str> {
    let mut found = None;
    for (name, check) in SOURCES {
        let source = v.at(name);
        if !source.present() {
            continue;
        }
        if found.is_some() {
            source.forbidden("may not specify more than 1 volume type");
        } else {
            found = Some(*name);
            check(&source);
        }
    }
    if found.is_none() {
        v.required("must specify a volume type");
    }
    found
}

/// The listed fields are not empty.
pub fn needs(s: &At<'_>, fields: &[&str]) {
    for f in fields {
        s.at(f).require();
    }
}

fn empty_dir(s: &At<'_>) {
    let limit = s.at("sizeLimit");
    if resources::quantity(limit.value).is_some_and(|q| q.is_negative()) {
        limit.forbidden("SizeLimit field must be a valid resource quantity");
    }
}

/// `hostPath` of a pod's volume or a PersistentVolume.
pub fn host_path(s: &At<'_>) {
    let path = s.at("path");
    path.require();
    no_backsteps(&path);
    let kind = s.at("type");
    if kind.present() && !HOST_PATH_TYPES.contains(&kind.str()) {
        kind.not_supported(&HOST_PATH_TYPES);
    }
}

fn git_repo(s: &At<'_>) {
    s.at("repository").require();
    let dir = s.at("directory");
    if !dir.is_empty() {
        descending(&dir);
    }
}

/// `nfs` of a pod's volume or a PersistentVolume.
pub fn nfs(s: &At<'_>) {
    needs(s, &["server", "path"]);
    let path = s.at("path");
    if !path.is_empty() && !path.str().starts_with('/') {
        path.invalid("must be an absolute path");
    }
}

/// `iscsi` of a pod's volume or a PersistentVolume.
pub fn iscsi(s: &At<'_>) {
    needs(s, &["targetPortal", "iqn"]);
    s.at("lun").in_range(0, 255);
}

/// `fc` of a pod's volume or a PersistentVolume.
pub fn fc(s: &At<'_>) {
    let wwns = s.at("targetWWNs");
    match (wwns.is_empty(), s.at("wwids").is_empty()) {
        (true, true) => wwns.required("must specify either targetWWNs or wwids, but not both"),
        (false, false) => wwns.invalid("targetWWNs and wwids can not be specified simultaneously"),
        (false, true) => match s.at("lun").int() {
            None => s.at("lun").required("lun is required if targetWWNs is specified"),
            Some(_) => s.at("lun").in_range(0, 255),
        },
        (true, false) => {}
    }
}

fn mode(at: &At<'_>) {
    if at.int().is_some_and(|m| !(0..=0o777).contains(&m)) {
        at.invalid(FILE_MODE_MSG);
    }
}

fn key_to_path(k: &At<'_>) {
    needs(k, &["key", "path"]);
    local_path(&k.at("path"));
    mode(&k.at("mode"));
}

fn secret(s: &At<'_>) {
    s.at("secretName").require();
    mode(&s.at("defaultMode"));
    for k in s.at("items").items() {
        key_to_path(&k);
    }
}

fn config_map(s: &At<'_>) {
    s.at("name").require();
    mode(&s.at("defaultMode"));
    for k in s.at("items").items() {
        key_to_path(&k);
    }
}

fn downward(s: &At<'_>) {
    mode(&s.at("defaultMode"));
    for f in s.at("items").items() {
        // Upstream names the volume's source here, not the item.
        downward_file(&f, s);
    }
}

fn downward_file(f: &At<'_>, report: &At<'_>) {
    let path = f.text("path").to_owned();
    let at_path = report.at("path");
    if path.is_empty() {
        at_path.required("");
    }
    let value = serde_json::Value::from(path);
    local_path(&at_path.with(&value));
    let (field, resource) = (f.at("fieldRef"), f.at("resourceFieldRef"));
    if field.present() {
        field_ref(&report.at("fieldRef").with(field.value), &DOWNWARD_PATHS);
        if resource.present() {
            report.invalid_value("resource", "fieldRef and resourceFieldRef can not be specified simultaneously");
        }
    } else if resource.present() {
        resource_ref(&report.at("resourceFieldRef").with(resource.value), true);
    } else {
        report.required("one of fieldRef and resourceFieldRef is required");
    }
    mode(&report.at("mode").with(f.at("mode").value));
}

fn projected(s: &At<'_>) {
    mode(&s.at("defaultMode"));
    let mut paths: Vec<String> = Vec::new();
    let unique = |path: &str, shown: &str, paths: &mut Vec<String>| {
        if path.is_empty() {
            return;
        }
        if paths.iter().any(|p| p == path) {
            s.invalid_value(shown, "conflicting duplicate paths");
        } else {
            paths.push(path.to_owned());
        }
    };
    for src in s.at("sources").items() {
        let mut count = 0;
        for kind in ["secret", "configMap"] {
            let p = src.at(kind);
            if p.present() {
                count += 1;
                p.at("name").require();
                for k in p.at("items").items() {
                    key_to_path(&k);
                    unique(k.text("path"), p.text("name"), &mut paths);
                }
            }
        }
        let p = src.at("downwardAPI");
        if p.present() {
            count += 1;
            for f in p.at("items").items() {
                downward_file(&f, &p);
                unique(f.text("path"), f.text("path"), &mut paths);
            }
        }
        let p = src.at("serviceAccountToken");
        if p.present() {
            count += 1;
            account_token(&p, s);
        }
        let p = src.at("clusterTrustBundle");
        if p.present() {
            count += 1;
            trust_bundle(&p);
            unique(p.text("path"), p.text("path"), &mut paths);
        }
        let p = src.at("podCertificate");
        if p.present() {
            count += 1;
            for f in ["credentialBundlePath", "keyPath", "certificateChainPath"] {
                if !p.text(f).is_empty() {
                    local_path(&p.at(f));
                    unique(p.text(f), p.text(f), &mut paths);
                }
            }
        }
        if count > 1 {
            src.forbidden("may not specify more than 1 volume type per source");
        }
    }
}

fn account_token(p: &At<'_>, report: &At<'_>) {
    let seconds = p.at("expirationSeconds");
    match seconds.int() {
        None => seconds.required(""),
        Some(n) if n < 600 => seconds.invalid("may not specify a duration less than 10 minutes"),
        Some(n) if n > 1 << 32 => seconds.invalid("may not specify a duration larger than 2^32 seconds"),
        Some(_) => {}
    }
    let path = report.at("path").with(p.at("path").value).path();
    if p.text("path").is_empty() {
        report.push(crate::field::FieldError::required(path, ""));
    } else {
        let at = report.at("path");
        let target = p.at("path");
        local_path(&at.with(target.value));
    }
}

fn trust_bundle(p: &At<'_>) {
    match (p.has("name"), p.has("signerName")) {
        (true, true) => p.invalid("only one of name and signerName may be used"),
        (true, false) => {
            if p.at("name").is_empty() {
                p.at("name").required("must be a valid object name");
            }
            if p.has("labelSelector") {
                p.at("labelSelector").invalid("labelSelector must be unset if name is specified");
            }
        }
        (false, true) => {
            if p.at("signerName").is_empty() {
                p.at("signerName").required("must be a valid signer name");
            }
            selectors::label_selector(&p.at("labelSelector"));
        }
        (false, false) => p.required("either name or signerName must be specified"),
    }
    p.at("path").require();
    local_path(&p.at("path"));
}

fn csi(s: &At<'_>) {
    storage::csi_driver_name(&s.at("driver"));
    let secret = s.at("nodePublishSecretRef");
    if secret.present() && secret.text("name").is_empty() {
        secret.at("name").required("");
    }
}

fn ephemeral(s: &At<'_>) {
    let template = s.at("volumeClaimTemplate");
    if !template.present() {
        return template.required("");
    }
    storage::claim_spec(&template.at("spec"));
}

/// No `..` in it.
pub fn no_backsteps(at: &At<'_>) {
    if at.str().split('/').any(|p| p == "..") {
        at.invalid("must not contain '..'");
    }
}

/// Relative, and no `..` in it.
pub fn descending(at: &At<'_>) {
    if at.str().starts_with('/') {
        at.invalid("must be a relative path");
    }
    no_backsteps(at);
}

/// [`descending`], and not one of the names that atomic writers use.
fn local_path(at: &At<'_>) {
    descending(at);
    if at.str().starts_with("..") && !at.str().starts_with("../") {
        at.invalid("must not start with '..'");
    }
}
