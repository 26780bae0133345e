{{/* Names, labels and the parts that several templates share. */}}

{{- define "kvmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvmesh.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvmesh.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.releaseLabels" -}}
app.kubernetes.io/name: {{ include "kvmesh.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of one component; takes (list root component). */}}
{{- define "kvmesh.selectorLabels" -}}
{{ include "kvmesh.releaseLabels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvmesh.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvmesh.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvmesh
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The metadata of one object; takes (list root component name). */}}
{{- define "kvmesh.metadata" -}}
name: {{ index . 2 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "kvmesh.labels" (list (index . 0) (index . 1)) | nindent 2 }}
{{- end -}}

{{- define "kvmesh.serviceAccountName" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if $root.Values.serviceAccount.create -}}
{{ include "kvmesh.fullname" $root }}-{{ $component }}
{{- else -}}
{{ get $root.Values.serviceAccount.existing $component | default "default" }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.image" -}}
{{- $image := (index . 0).Values.image -}}
{{ $image.repository }}:{{ index . 1 }}
{{- end -}}

{{- define "kvmesh.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Addresses of the coordinators, all of them, for members of the mesh. */}}
{{- define "kvmesh.coordinatorUrls" -}}
{{- $name := printf "%s-coordinator" (include "kvmesh.fullname" .) -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.coordinator.replicas) -}}
{{- $urls = append $urls (printf "%s://%s-%d.%s:8400" (include "kvmesh.scheme" $) $name $i $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{- define "kvmesh.scheme" -}}
{{- if .Values.tls.enabled -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "kvmesh.tlsSecretName" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{- define "kvmesh.curveSecretName" -}}
{{- .Values.tls.curve.existingSecret | default (printf "%s-curve" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{/* Whether a component has sockets of events or matches. */}}
{{- define "kvmesh.speaksCurve" -}}
{{- if has . (list "router" "context" "generation" "indexer") }}true{{ end -}}
{{- end -}}

{{/* The certificates in a settings file. Takes (list root component). */}}
{{- define "kvmesh.tlsSettings" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.enabled -}}
tls:
  cert_file: /etc/kvmesh/tls/tls.crt
  key_file: /etc/kvmesh/tls/tls.key
  ca_file: /etc/kvmesh/tls/ca.crt
  server_name: {{ $root.Values.tls.serverName }}
  {{- if ne (index . 1) "router" }}
  client_auth: {{ $root.Values.tls.clientAuth }}
  {{- end }}
{{- if include "kvmesh.speaksCurve" (index . 1) }}
curve:
  key_file: /etc/kvmesh/curve/kvmesh.key_secret
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.tlsMounts" -}}
{{- if (index . 0).Values.tls.enabled -}}
- {name: tls, mountPath: /etc/kvmesh/tls, readOnly: true}
{{- if include "kvmesh.speaksCurve" (index . 1) }}
- {name: curve, mountPath: /etc/kvmesh/curve, readOnly: true}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.tlsVolumes" -}}
{{- if (index . 0).Values.tls.enabled -}}
- name: tls
  secret:
    secretName: {{ include "kvmesh.tlsSecretName" (index . 0) }}
    defaultMode: 0440
{{- if include "kvmesh.speaksCurve" (index . 1) }}
- name: curve
  secret:
    secretName: {{ include "kvmesh.curveSecretName" (index . 0) }}
    defaultMode: 0440
{{- end }}
{{- end -}}
{{- end -}}

{{/*
How a probe asks a service. Takes (list root component path). The kubelet has no certificate: where one is required, the
product's own command asks, which has the service's.
*/}}
{{- define "kvmesh.probe" -}}
{{- $tls := (index . 0).Values.tls -}}
{{- if and $tls.enabled (eq $tls.clientAuth "required") (ne (index . 1) "router") -}}
exec: {command: [kvmesh, health]}
{{- else -}}
httpGet: {path: {{ index . 2 }}, port: http, scheme: {{ include "kvmesh.scheme" (index . 0) | upper }}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.clusterSecretName" -}}
{{- .Values.clusterSecret.existingSecret | default (printf "%s-cluster-secret" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{- define "kvmesh.hasApiKeys" -}}
{{- if or .Values.apiKeys.keys .Values.apiKeys.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "kvmesh.apiKeysSecretName" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{/* What every service is started with, after its name. What the image has in its environment must be a flag. */}}
{{- define "kvmesh.commonArgs" -}}
- --host
- {{ .Values.bindHost | quote }}
- --log-format
- {{ .Values.log.format }}
- --log-level
- {{ .Values.log.level }}
{{- end -}}

{{/* The model, the name that clients use, and where traces go. */}}
{{- define "kvmesh.modelSettings" -}}
model: {{ .Values.model.name | quote }}
{{- with .Values.model.servedName }}
served_model_name: {{ . | quote }}
{{- end }}
{{- with .Values.otlpEndpoint }}
otlp_endpoint: {{ . }}
{{- end }}
{{- end -}}

{{/* Environment of a container: the pod's own facts, the model cache, and the user's. Takes (list root component). */}}
{{- define "kvmesh.env" -}}
{{- $root := index . 0 -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: KVMESH_MODEL_DIR
  value: /var/lib/kvmesh/models
{{- with (get $root.Values (index . 1)).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a pod spec begins with. Takes (list root component). */}}
{{- define "kvmesh.podSpec" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := get $root.Values $component -}}
serviceAccountName: {{ include "kvmesh.serviceAccountName" . }}
automountServiceAccountToken: {{ include "kvmesh.needsToken" . | default "false" }}
# A service named like the product would otherwise define KVMESH_... variables, which are settings.
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if $values.affinity }}
  {{- toYaml $values.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvmesh.selectorLabels" . | nindent 14 }}
  {{- end }}
{{- if hasKey $values "topologySpreadConstraints" }}
topologySpreadConstraints:
  {{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvmesh.selectorLabels" . | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Whether a component talks to the Kubernetes API. Takes (list root component). */}}
{{- define "kvmesh.needsToken" -}}
{{- if and (eq (index . 1) "coordinator") (eq (index . 0).Values.discovery "endpointslice") }}true{{ end -}}
{{- end -}}

{{/* Labels and annotations of a pod. Takes (list root component). */}}
{{- define "kvmesh.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := get $root.Values $component -}}
labels:
  {{- include "kvmesh.selectorLabels" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # Its own settings only: a change of the router's does not start the servers anew.
  checksum/config: {{ include "kvmesh.config" . | sha256sum }}
  checksum/secret: {{ include "kvmesh.secretsInUse" . | sha256sum }}
  {{- with $values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
Which secrets a pod is started with; other ones start it anew. The cluster secret itself only where it is used: whoever
may list these pods could try to guess it (values.schema.json asks for 16 characters). Takes (list root component).
*/}}
{{- define "kvmesh.secretsInUse" -}}
{{- $values := (index . 0).Values -}}
{{- /* A certificate with other names or days is taken in as services run. */ -}}
{{- $own := list (omit $values.tls "extraNames" "days") -}}
{{- if eq (index . 1) "router" -}}
{{- $own = append $own $values.apiKeys.existingSecret -}}
{{- else if has (index . 1) (list "context" "generation") -}}
{{- $own = append $own $values.clusterSecret -}}
{{- else if and (eq (index . 1) "coordinator") (eq $values.etcd.mode "external") -}}
{{- $own = concat $own (list $values.etcd.tls $values.etcd.auth) -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}

{{/* Downloads a built-in model once for the pod. Takes (list root tag). */}}
{{- define "kvmesh.modelInit" -}}
{{- $root := index . 0 -}}
{{- if and (not $root.Values.model.fetch) (not $root.Values.model.volume) }}
{{- fail "model.volume must name the volume that has the model when model.fetch is false" }}
{{- end }}
{{- if $root.Values.model.fetch }}
initContainers:
  - name: model
    image: {{ include "kvmesh.image" (list $root (index . 1)) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [model, fetch, {{ $root.Values.model.name | quote }}]
    env:
      - name: HOME
        value: /tmp
      - name: KVMESH_MODEL_DIR
        value: /var/lib/kvmesh/models
    securityContext:
      {{- include "kvmesh.containerSecurityContext" $root | nindent 6 }}
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {memory: 512Mi}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: models, mountPath: /var/lib/kvmesh/models}
{{- end }}
{{- end -}}

{{/* Seconds a pod has from its deletion to its end. Takes (list values seconds-before-SIGTERM default-drain_s). */}}
{{- define "kvmesh.grace" -}}
{{- $values := index . 0 -}}
{{- $drain := add (ceil (get $values.settings "drain_s" | default 10.0) | int) (int (index . 1)) -}}
{{- if $values.terminationGracePeriodSeconds -}}
{{- if le (int $values.terminationGracePeriodSeconds) (int $drain) -}}
{{- fail (printf "terminationGracePeriodSeconds %d would kill pods that still drain: they take up to %d s (preStopSeconds and settings.drain_s)" (int $values.terminationGracePeriodSeconds) (int $drain)) -}}
{{- end -}}
{{ int $values.terminationGracePeriodSeconds }}
{{- else -}}
{{ add $drain 15 }}
{{- end -}}
{{- end -}}

{{/*
How many pods; nothing where somebody else says it. What runs then stays: a number that goes missing would mean one.
Takes (list root kind name values).
*/}}
{{- define "kvmesh.replicas" -}}
{{- $values := index . 3 -}}
{{- if or $values.autoscaling.enabled (kindIs "invalid" $values.replicas) -}}
{{- with lookup "apps/v1" (index . 1) (index . 0).Release.Namespace (index . 2) }}{{ .spec.replicas }}{{ end -}}
{{- else -}}
{{ $values.replicas }}
{{- end -}}
{{- end -}}

{{/* A HorizontalPodAutoscaler. Takes (list root component kind). */}}
{{- define "kvmesh.hpa" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $scaling := (get $root.Values $component).autoscaling -}}
{{- $name := printf "%s-%s" (include "kvmesh.fullname" $root) $component -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas" $component) }}
{{- end }}
{{- if and $scaling.enabled (not $scaling.metrics) (not (get $scaling "targetCPUUtilizationPercentage")) }}
{{- fail (printf "%s.autoscaling.metrics must say by what to scale; docs/kubernetes.md has examples" $component) }}
{{- end }}
{{- if and $scaling.enabled ($root.Capabilities.APIVersions.Has "autoscaling/v2") }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "kvmesh.metadata" (list $root $component $name) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ index . 2 }}
    name: {{ $name }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    {{- with $scaling.targetCPUUtilizationPercentage }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ . }}}
    {{- end }}
    {{- with $scaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $scaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A PodDisruptionBudget. Takes (list root component). */}}
{{- define "kvmesh.pdb" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $budget := (get $root.Values $component).podDisruptionBudget -}}
{{- if and $budget.enabled ($root.Capabilities.APIVersions.Has "policy/v1") }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvmesh.metadata" (list $root $component (printf "%s-%s" (include "kvmesh.fullname" $root) $component)) | nindent 2 }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  {{- if semverCompare ">=1.27-0" $root.Capabilities.KubeVersion.Version }}
  # A pod that does not get ready must not keep a node from being drained: it serves nobody.
  unhealthyPodEvictionPolicy: AlwaysAllow
  {{- end }}
  selector:
    matchLabels:
      {{- include "kvmesh.selectorLabels" (list $root $component) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* HTTP port of a context or generation server. */}}
{{- define "kvmesh.workerPort" -}}
{{- if eq . "context" -}}8100{{- else -}}8200{{- end -}}
{{- end -}}

{{/* Client URLs of etcd, as a JSON list; empty where there is none. */}}
{{- define "kvmesh.etcdEndpoints" -}}
{{- $name := printf "%s-etcd" (include "kvmesh.fullname" .) -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- if not .Values.etcd.endpoints -}}
{{- fail "etcd.endpoints must name the members when etcd.mode is external" -}}
{{- end -}}
{{- toJson .Values.etcd.endpoints -}}
{{- else if eq .Values.etcd.mode "bundled" -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $urls = append $urls (printf "%s://%s-%d.%s:2379" (include "kvmesh.scheme" $) $name $i $name) -}}
{{- end -}}
{{- toJson $urls -}}
{{- end -}}
{{- end -}}
