// Writes upstream's own encodings of objects that k8s.io/api's test data lacks: kinds of other modules,
// sparse objects (what is written for empty fields), lists and options.
//
//	cd tests/upstream && go run ../../tools/facts/golden/main.go ../../src/api/protobuf/golden
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authentication/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

func ptr[T any](value T) *T { return &value }

func main() {
	out := os.Args[1]
	scheme := runtime.NewScheme()
	serializer := protobuf.NewSerializer(scheme, scheme)
	f := 0.5
	schema := apiextensionsv1.JSONSchemaProps{
		Type: "object", Ref: ptr("#/r"), Schema: "s", ID: "i", Maximum: &f, ExclusiveMaximum: true, MinLength: ptr(int64(3)),
		Enum:    []apiextensionsv1.JSON{{Raw: []byte(`"a"`)}, {Raw: []byte(`{"b":1}`)}},
		Default: &apiextensionsv1.JSON{Raw: []byte(`{"c":null}`)}, Required: []string{"x"},
		Properties: map[string]apiextensionsv1.JSONSchemaProps{
			"list":  {Type: "array", Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &apiextensionsv1.JSONSchemaProps{Type: "string"}}},
			"tuple": {Type: "array", Items: &apiextensionsv1.JSONSchemaPropsOrArray{JSONSchemas: []apiextensionsv1.JSONSchemaProps{{Type: "string"}}}},
			"map":   {AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Allows: true, Schema: &apiextensionsv1.JSONSchemaProps{XIntOrString: true}}},
			"no":    {AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Allows: false}},
			"deps":  {Dependencies: apiextensionsv1.JSONSchemaDependencies{"p": {Property: []string{"q"}}}},
		},
		XPreserveUnknownFields: ptr(true), XListMapKeys: []string{"k"}, XListType: ptr("map"), XMapType: ptr("atomic"),
		XValidations: apiextensionsv1.ValidationRules{{Rule: "self.x", Message: "m"}},
	}
	objects := map[string]runtime.Object{
		"crd": &apiextensionsv1.CustomResourceDefinition{
			TypeMeta: metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinition"}, ObjectMeta: metav1.ObjectMeta{Name: "a.b"},
			Spec: apiextensionsv1.CustomResourceDefinitionSpec{Group: "b", Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "a", Kind: "A"}, Scope: "Cluster",
				Versions:   []apiextensionsv1.CustomResourceDefinitionVersion{{Name: "v1", Served: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &schema}}},
				Conversion: &apiextensionsv1.CustomResourceConversion{Strategy: "Webhook", Webhook: &apiextensionsv1.WebhookConversion{ClientConfig: &apiextensionsv1.WebhookClientConfig{CABundle: []byte{1, 2}}, ConversionReviewVersions: []string{"v1"}}}},
		},
		"apiservice": &apiregistrationv1.APIService{TypeMeta: metav1.TypeMeta{APIVersion: "apiregistration.k8s.io/v1", Kind: "APIService"}, ObjectMeta: metav1.ObjectMeta{Name: "v1.b"},
			Spec: apiregistrationv1.APIServiceSpec{Group: "b", Version: "v1", Service: &apiregistrationv1.ServiceReference{Name: "s", Port: ptr(int32(443))}, GroupPriorityMinimum: 100}},
		"sparse-pod": &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{ContainerPort: 80}},
				LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(80)}}},
				Env:           []corev1.EnvVar{{Name: "e", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}}},
				Resources:     corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"), "memory": resource.MustParse("1Gi")}}}},
				Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}, TerminationGracePeriodSeconds: ptr(int64(0))}},
		"sparse-deployment": &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}, Spec: appsv1.DeploymentSpec{Replicas: ptr(int32(-1)), Selector: &metav1.LabelSelector{}}},
		"sparse-ingress":    &networkingv1.Ingress{TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "Ingress"}, Spec: networkingv1.IngressSpec{Rules: []networkingv1.IngressRule{{Host: "h"}}}},
		"sparse-pv":         &corev1.PersistentVolume{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}},
		"sparse-event":      &corev1.Event{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Event"}},
		"sparse-cronjob":    &batchv1.CronJob{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "CronJob"}},
		"empty-secret":      &corev1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, Data: map[string][]byte{"a": {}, "b": []byte("x")}},
		"clusterrole":       &rbacv1.ClusterRole{TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole"}, Rules: []rbacv1.PolicyRule{{Verbs: []string{"*"}, APIGroups: []string{""}}}},
		"delete-options":    &metav1.DeleteOptions{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DeleteOptions"}, GracePeriodSeconds: ptr(int64(0)), Preconditions: &metav1.Preconditions{ResourceVersion: ptr("7")}, PropagationPolicy: ptr(metav1.DeletePropagationForeground), DryRun: []string{"All"}},
		"eviction":          &policyv1.Eviction{TypeMeta: metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"}, ObjectMeta: metav1.ObjectMeta{Name: "p"}},
		"scale":             &autoscalingv1.Scale{TypeMeta: metav1.TypeMeta{APIVersion: "autoscaling/v1", Kind: "Scale"}, Spec: autoscalingv1.ScaleSpec{Replicas: 3}},
		"token-request":     &authv1.TokenRequest{TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"}, Spec: authv1.TokenRequestSpec{Audiences: []string{"a"}, ExpirationSeconds: ptr(int64(600))}},
		"token-review":      &authv1.TokenReview{TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"}, Status: authv1.TokenReviewStatus{User: authv1.UserInfo{Username: "u", Extra: map[string]authv1.ExtraValue{"k": {"v", "w"}}}}},
		"status":            &metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: 404, Reason: "NotFound", Details: &metav1.StatusDetails{Name: "n", Causes: []metav1.StatusCause{{Type: "t", Message: "m", Field: "f"}}}},
		"partial":           &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}, ObjectMeta: metav1.ObjectMeta{Name: "n"}},
		"partial-list":      &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}, ListMeta: metav1.ListMeta{ResourceVersion: "3"}, Items: []metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Name: "n"}}}},
		"pod-list":          &corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "3", Continue: "c", RemainingItemCount: ptr(int64(2))}, Items: []corev1.Pod{{}}},
		"api-resources":     &metav1.APIResourceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIResourceList"}, GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "pods", Verbs: metav1.Verbs{"get"}}}},
	}
	for name, object := range objects {
		var binary bytes.Buffer
		if err := serializer.Encode(object, &binary); err != nil {
			panic(err)
		}
		text, err := json.Marshal(object)
		if err != nil {
			panic(err)
		}
		for extension, content := range map[string][]byte{".pb": binary.Bytes(), ".json": append(text, '\n')} {
			if err := os.WriteFile(filepath.Join(out, name+extension), content, 0o644); err != nil {
				panic(err)
			}
		}
	}
}
