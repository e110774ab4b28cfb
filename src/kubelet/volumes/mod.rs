//! Volumes of pods: made, kept up to date, taken away.
//!
//! Everything here can be repeated: [`Volumes::setup`] brings a pod's directory into its desired state, whatever it finds.

pub mod atomic;
pub mod local;
pub mod mounts;
pub mod projection;
pub mod subpath;

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    EmptyDirVolumeSource, HostPathVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, ProjectedVolumeSource, Volume,
};
use kube::{Api, Client};

use self::atomic::Payload;
use crate::objects::Objects;
use crate::pod::{env, model};
use crate::tokens::Tokens;

/// A volume as it is on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub path: PathBuf,
    pub read_only: bool,
}

/// Volumes by name, and when something in them has to be renewed.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    pub volumes: HashMap<String, Mounted>,
    pub renew: Option<Timestamp>,
}

pub struct Volumes {
    pub client: Client,
    pub objects: Arc<Objects>,
    pub tokens: Arc<Tokens>,
    /// Holds a directory per pod uid.
    pub pods_dir: PathBuf,
}

struct Request<'a> {
    pod: &'a Pod,
    runtime: &'a env::Runtime,
    renew: Option<Timestamp>,
}

impl Volumes {
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.pods_dir.join(uid)
    }

    fn dir(&self, pod: &Pod, plugin: &str, name: &str) -> PathBuf {
        self.pod_dir(model::uid(pod)).join("volumes").join(format!("kubernetes.io~{plugin}")).join(name)
    }

    /// Brings all volumes of the pod into their desired state.
    ///
    /// # Errors
    /// The message of a `FailedMount` event.
    pub async fn setup(&self, pod: &Pod, runtime: &env::Runtime) -> Result<Setup, String> {
        let mut request = Request { pod, runtime, renew: None };
        let mut setup = Setup::default();
        for volume in model::spec(pod).volumes.iter().flatten() {
            let mounted = self.one(&mut request, volume).await.map_err(|e| format!("MountVolume.SetUp failed for volume \"{}\" : {e}", volume.name))?;
            setup.volumes.insert(volume.name.clone(), mounted);
        }
        setup.renew = request.renew;
        Ok(setup)
    }

    async fn one(&self, request: &mut Request<'_>, volume: &Volume) -> Result<Mounted, String> {
        let pod = request.pod;
        let name = &volume.name;
        if let Some(source) = &volume.empty_dir {
            return self.empty_dir(pod, name, source).map(writable);
        }
        if let Some(source) = &volume.host_path {
            host_path(source)?;
            return Ok(writable(PathBuf::from(&source.path)));
        }
        if let Some(source) = &volume.config_map {
            let payload = self.config_map(pod, &source.name, source.items.as_deref(), source.default_mode, source.optional == Some(true)).await?;
            return self.write(pod, "configmap", name, &payload, false).await;
        }
        if let Some(source) = &volume.secret {
            let secret = source.secret_name.as_deref().unwrap_or("");
            let payload = self.secret(pod, secret, source.items.as_deref(), source.default_mode, source.optional == Some(true)).await?;
            return self.write(pod, "secret", name, &payload, true).await;
        }
        if let Some(source) = &volume.downward_api {
            let payload = projection::downward(pod, source.items.as_deref().unwrap_or_default(), source.default_mode, request.runtime)?;
            return self.write(pod, "downward-api", name, &payload, false).await;
        }
        if let Some(source) = &volume.projected {
            let payload = self.projected(request, source).await?;
            return self.write(pod, "projected", name, &payload, true).await;
        }
        if let Some(source) = &volume.persistent_volume_claim {
            return self.claim(pod, &source.claim_name, source.read_only == Some(true), None).await;
        }
        if volume.ephemeral.is_some() {
            let claim = format!("{}-{name}", model::name(pod));
            return self.claim(pod, &claim, false, pod.metadata.uid.as_deref()).await;
        }
        Err(format!("{} volumes are not supported by this node", kind(volume)))
    }

    fn empty_dir(&self, pod: &Pod, name: &str, source: &EmptyDirVolumeSource) -> Result<PathBuf, String> {
        let path = self.dir(pod, "empty-dir", name);
        let result = match source.medium.as_deref().unwrap_or("") {
            "" => if path.exists() { Ok(()) } else { mounts::dir(&path, 0o777) },
            "Memory" => {
                let limit = source.size_limit.as_ref().and_then(|q| q.0.parse().ok()).map_or(0, |q: windlass_api::quantity::Quantity| q.value());
                let pod_limit = model::pod_limit(pod, "memory").unwrap_or(0);
                let size = match (limit, pod_limit) {
                    (0, p) => p,
                    (l, 0) => l,
                    (l, p) => l.min(p),
                };
                mounts::tmpfs(&path, size, 0o777)
            }
            other => return Err(format!("emptyDir medium {other:?} is not supported by this node")),
        };
        result.and_then(|()| apply_group(pod, &path, false)).map_err(|e| e.to_string())?;
        Ok(path)
    }

    async fn config_map(&self, pod: &Pod, name: &str, items: Option<&[k8s_openapi::api::core::v1::KeyToPath]>, mode: Option<i32>, optional: bool) -> Result<Payload, String> {
        let object = self.objects.config_map(model::uid(pod), model::namespace(pod), name).await?;
        projection::config_map(object.as_deref(), name, items, mode, optional)
    }

    async fn secret(&self, pod: &Pod, name: &str, items: Option<&[k8s_openapi::api::core::v1::KeyToPath]>, mode: Option<i32>, optional: bool) -> Result<Payload, String> {
        let object = self.objects.secret(model::uid(pod), model::namespace(pod), name).await?;
        projection::secret(object.as_deref(), name, items, mode, optional)
    }

    async fn projected(&self, request: &mut Request<'_>, source: &ProjectedVolumeSource) -> Result<Payload, String> {
        let pod = request.pod;
        let default = source.default_mode;
        let mut payload = Payload::new();
        let mut errors = Vec::new();
        for part in source.sources.iter().flatten() {
            let files = if let Some(s) = &part.config_map {
                self.config_map(pod, &s.name, s.items.as_deref(), default, s.optional == Some(true)).await
            } else if let Some(s) = &part.secret {
                self.secret(pod, &s.name, s.items.as_deref(), default, s.optional == Some(true)).await
            } else if let Some(s) = &part.downward_api {
                projection::downward(pod, s.items.as_deref().unwrap_or_default(), default, request.runtime)
            } else if let Some(s) = &part.service_account_token {
                let token = self.tokens.get(pod, s.audience.as_deref().unwrap_or(""), s.expiration_seconds.unwrap_or(3600)).await;
                token.map(|(token, renew)| {
                    request.renew = Some(request.renew.map_or(renew, |r| r.min(renew)));
                    Payload::from([(s.path.clone(), projection::token_file(pod, token, default))])
                })
            } else if part.cluster_trust_bundle.is_some() {
                Err("projected clusterTrustBundle is not supported by this node".to_owned())
            } else if part.pod_certificate.is_some() {
                Err("projected podCertificate is not supported by this node".to_owned())
            } else {
                Err("a projected source is of a kind that this node does not know".to_owned())
            };
            match files {
                Ok(files) => payload.extend(files),
                Err(e) => errors.push(e),
            }
        }
        if errors.is_empty() { Ok(payload) } else { Err(errors.join(", ")) }
    }

    async fn write(&self, pod: &Pod, plugin: &str, name: &str, payload: &Payload, in_memory: bool) -> Result<Mounted, String> {
        projection::check(payload)?;
        let path = self.dir(pod, plugin, name);
        let (pod, payload, target) = (pod.clone(), payload.clone(), path.clone());
        let work = move || -> io::Result<()> {
            if in_memory {
                mounts::tmpfs(&target, 0, 0o777)?;
            } else if !target.exists() {
                mounts::dir(&target, 0o777)?;
            }
            // The group must hold before the data is visible.
            atomic::write(&target, &payload, |fresh| apply_group(&pod, fresh, true))?;
            Ok(())
        };
        tokio::task::spawn_blocking(work).await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        Ok(Mounted { path, read_only: true })
    }

    async fn claim(&self, pod: &Pod, name: &str, read_only: bool, owner: Option<&str>) -> Result<Mounted, String> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), model::namespace(pod));
        let claim = claims.get_opt(name).await.map_err(|e| e.to_string())?.ok_or_else(|| format!("persistentvolumeclaim \"{name}\" not found"))?;
        if let Some(owner) = owner {
            let owned = claim.metadata.owner_references.iter().flatten().any(|r| r.uid == owner && r.controller == Some(true));
            if !owned {
                return Err(format!("PVC {}/{name} was not created for pod {} (pod is not owner)", model::namespace(pod), model::name(pod)));
            }
        }
        if claim.metadata.deletion_timestamp.is_some() {
            return Err("can't start pod because PVC is being deleted".into());
        }
        let spec = claim.spec.unwrap_or_default();
        let bound = claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound");
        let volume_name = spec.volume_name.filter(|v| bound && !v.is_empty()).ok_or_else(|| format!("PVC is not bound: {}/{name}", model::namespace(pod)))?;
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let volume = volumes.get_opt(&volume_name).await.map_err(|e| e.to_string())?.ok_or_else(|| format!("persistentvolume \"{volume_name}\" not found"))?;
        let claimed = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).and_then(|r| r.uid.as_deref());
        if claimed != claim.metadata.uid.as_deref() {
            return Err(format!("PersistentVolume \"{volume_name}\" is bound to another claim"));
        }
        if volume.spec.as_ref().and_then(|s| s.volume_mode.as_deref()) == Some("Block") {
            return Err("block volumes are not supported by this node".into());
        }
        let path = local::path(&volume)?;
        let (pod, target) = (pod.clone(), path.clone());
        tokio::task::spawn_blocking(move || apply_group(&pod, &target, false)).await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        Ok(Mounted { path, read_only })
    }

    /// Unmounts and removes everything the pod had on disk. The data of local persistent volumes is elsewhere and stays.
    pub async fn teardown(&self, uid: &str) -> io::Result<()> {
        let dir = self.pod_dir(uid);
        self.objects.release(uid);
        self.tokens.release(uid);
        tokio::task::spawn_blocking(move || mounts::remove(&dir)).await.map_err(io::Error::other)?
    }
}

fn writable(path: PathBuf) -> Mounted {
    Mounted { path, read_only: false }
}

fn kind(volume: &Volume) -> String {
    let value = serde_json::to_value(volume).unwrap_or_default();
    value.as_object().into_iter().flatten().map(|(k, _)| k.as_str()).find(|k| *k != "name").unwrap_or("unnamed").to_owned()
}

fn host_path(source: &HostPathVolumeSource) -> Result<(), String> {
    let path = Path::new(&source.path);
    let kind = source.type_.as_deref().unwrap_or("");
    let meta = std::fs::metadata(path);
    let fail = |what: &str| Err(format!("hostPath type check failed: {} is not {what}", source.path));
    let made = |r: io::Result<()>| r.map_err(|e| format!("{}: {e}", source.path));
    match (kind, &meta) {
        ("" , Ok(_)) => Ok(()),
        ("", Err(_)) => made(std::fs::create_dir_all(path)),
        ("DirectoryOrCreate", Err(_)) => made(mounts::dir(path, 0o755)),
        ("FileOrCreate", Err(_)) => made(std::fs::OpenOptions::new().create(true).append(true).open(path).and_then(|f| f.set_permissions(std::fs::Permissions::from_mode(0o644)))),
        ("Directory" | "DirectoryOrCreate", Ok(m)) if m.is_dir() => Ok(()),
        ("File" | "FileOrCreate", Ok(m)) if m.is_file() => Ok(()),
        ("Socket", Ok(m)) if m.file_type().is_socket() => Ok(()),
        ("CharDevice", Ok(m)) if m.file_type().is_char_device() => Ok(()),
        ("BlockDevice", Ok(m)) if m.file_type().is_block_device() => Ok(()),
        ("Directory" | "DirectoryOrCreate", _) => fail("a directory"),
        ("File" | "FileOrCreate", _) => fail("a file"),
        ("Socket", _) => fail("a socket file"),
        ("CharDevice", _) => fail("a character device"),
        ("BlockDevice", _) => fail("a block device"),
        (other, _) => Err(format!("{other} is an invalid volume type")),
    }
}

/// Gives everything below `root` to the pod's fsGroup, as upstream: group read and write (read only for projections),
/// set-group-id on directories.
fn apply_group(pod: &Pod, root: &Path, read_only: bool) -> io::Result<()> {
    let Some(context) = &model::spec(pod).security_context else { return Ok(()) };
    let Some(group) = context.fs_group.and_then(|g| u32::try_from(g).ok()) else { return Ok(()) };
    let on_mismatch = context.fs_group_change_policy.as_deref() == Some("OnRootMismatch");
    if on_mismatch {
        let meta = std::fs::metadata(root)?;
        if meta.gid() == group && meta.mode() & 0o2070 == 0o2070 {
            return Ok(());
        }
    }
    let add = if read_only { 0o440 } else { 0o660 };
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let meta = std::fs::symlink_metadata(&path)?;
        std::os::unix::fs::lchown(&path, None, Some(group))?;
        if meta.file_type().is_symlink() {
            continue;
        }
        let mut mode = meta.mode() & 0o7777 | add;
        if meta.is_dir() {
            mode |= 0o2110;
            pending.extend(std::fs::read_dir(&path)?.flatten().map(|e| e.path()));
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// A file written as a whole: readers see the old text or the new one.
pub fn write_whole(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    // The file is bind-mounted into containers: it keeps its inode, so it is written in place when it is already there.
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

