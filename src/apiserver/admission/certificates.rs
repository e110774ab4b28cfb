//! The certificate plugins: who approves, signs and attests, and for whom a client certificate may not be.

use super::pods::text;
use super::{AdmissionRequest, Operation, Plugin};
use crate::authz::{Attributes, Authorizer};
use crate::request::UserInfo;
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::ApiError;

const GROUP: &str = "certificates.k8s.io";
const CSRS: &str = "certificatesigningrequests";

/// Whether the user may `verb` for a signer, by its name or by its domain (`example.com/*`).
fn authorized(authorizer: &dyn Authorizer, user: &UserInfo, verb: &str, signer: &str) -> bool {
    let domain = format!("{}/*", signer.split('/').next().unwrap_or_default());
    [signer, &domain].into_iter().any(|name| {
        let attributes = Attributes { name, ..Attributes::resource(user, verb, GROUP, "signers") };
        authorizer.authorize(&attributes).is_allowed()
    })
}

/// `certificatesigningrequests/approval` needs `approve` on the signer.
pub struct CertificateApproval {
    pub authorizer: Arc<dyn Authorizer>,
}

#[async_trait]
impl Plugin for CertificateApproval {
    fn name(&self) -> &'static str {
        "CertificateApproval"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let (true, Some(old)) = (request.is(GROUP, CSRS) && request.subresource == "approval", request.old) else {
            return Ok(());
        };
        let signer = text(&old["spec"], "signerName");
        if authorized(self.authorizer.as_ref(), request.user, "approve", signer) {
            return Ok(());
        }
        Err(request.forbidden(format!("user not permitted to approve requests with signerName {signer:?}")))
    }
}

/// A certificate or a condition in a CSR's status needs `sign` on the signer.
pub struct CertificateSigning {
    pub authorizer: Arc<dyn Authorizer>,
}

#[async_trait]
impl Plugin for CertificateSigning {
    fn name(&self) -> &'static str {
        "CertificateSigning"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let (true, Some(old)) = (request.is(GROUP, CSRS) && request.subresource == "status", request.old) else {
            return Ok(());
        };
        let (new_status, old_status) = (&request.new_object()["status"], &old["status"]);
        let same = |field: &str| new_status[field] == old_status[field];
        if same("certificate") && same("conditions") {
            return Ok(());
        }
        let signer = text(&old["spec"], "signerName");
        if authorized(self.authorizer.as_ref(), request.user, "sign", signer) {
            return Ok(());
        }
        Err(request.forbidden(format!("user not permitted to sign requests with signerName {signer:?}")))
    }
}

/// A trust bundle that names a signer needs `attest` on it.
pub struct ClusterTrustBundleAttest {
    pub authorizer: Arc<dyn Authorizer>,
}

#[async_trait]
impl Plugin for ClusterTrustBundleAttest {
    fn name(&self) -> &'static str {
        "ClusterTrustBundleAttest"
    }
    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is(GROUP, "clustertrustbundles") {
            return Ok(());
        }
        let signer = text(&request.new_object()["spec"], "signerName");
        let unchanged = request.old.is_some_and(|old| {
            let keep = |object: &Value| (object["spec"].clone(), object["metadata"]["labels"].clone());
            keep(old) == keep(request.new_object())
        });
        if signer.is_empty() || unchanged || authorized(self.authorizer.as_ref(), request.user, "attest", signer) {
            return Ok(());
        }
        Err(request.forbidden(format!("user not permitted to attest for signerName {signer:?}")))
    }
}

/// Nobody asks the API server's client signer for `system:masters`.
pub struct CertificateSubjectRestriction;

#[async_trait]
impl Plugin for CertificateSubjectRestriction {
    fn name(&self) -> &'static str {
        "CertificateSubjectRestriction"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        const SIGNER: &str = "kubernetes.io/kube-apiserver-client";
        let spec = &request.new_object()["spec"];
        if !request.is_object(GROUP, CSRS) || text(spec, "signerName") != SIGNER {
            return Ok(());
        }
        let parsed = crate::pki::csr::Request::from_spec(spec)
            .map_err(|error| request.forbidden(format!("failed to parse CSR: {error}")))?;
        if parsed.organizations.iter().any(|group| group == crate::authn::MASTERS) {
            let why = format!("use of {SIGNER} signer with system:masters group is not allowed");
            return Err(request.forbidden(why));
        }
        Ok(())
    }
}
