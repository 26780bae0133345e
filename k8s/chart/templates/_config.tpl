{{/* The settings file of a service. Takes (list root component). */}}
{{- define "kvmesh.config" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := get $root.Values $component -}}
{{- include (printf "kvmesh.config.%s" $component) . }}
{{- with include "kvmesh.tlsSettings" . }}
{{ . }}
{{- end }}
{{- with $values.settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvmesh.config.router" -}}
{{- $root := index . 0 -}}
{{- $name := include "kvmesh.fullname" $root -}}
port: 8000
{{ include "kvmesh.modelSettings" $root }}
coordinator_url: {{ include "kvmesh.coordinatorUrls" $root | quote }}
indexer_url: {{ include "kvmesh.scheme" $root }}://{{ $name }}-indexer:8300
indexer_match_endpoint: tcp://{{ $name }}-indexer:8301
{{- if include "kvmesh.hasApiKeys" $root }}
api_keys_file: /etc/kvmesh/api-keys/keys
{{- end }}
{{- end -}}

{{- define "kvmesh.config.context" -}}
{{- include "kvmesh.config.server" . -}}
{{- end -}}

{{- define "kvmesh.config.generation" -}}
{{- include "kvmesh.config.server" . -}}
{{- end -}}

{{/* The public sections are those of values.yaml, a server's own keys before the common ones. */}}
{{- define "kvmesh.config.server" -}}
{{- $root := index . 0 -}}
{{- $values := get $root.Values (index . 1) -}}
{{- $cache := mergeOverwrite (deepCopy $root.Values.kv_cache_config) $values.kv_cache_config -}}
{{- $events := mergeOverwrite (deepCopy $root.Values.kv_events_config) $values.kv_events_config -}}
{{- $transceiver := mergeOverwrite (deepCopy $root.Values.cache_transceiver_config) $values.cache_transceiver_config -}}
port: {{ include "kvmesh.workerPort" (index . 1) }}
{{ include "kvmesh.modelSettings" $root }}
coordinator_url: {{ include "kvmesh.coordinatorUrls" $root | quote }}
cluster_secret_file: /etc/kvmesh/cluster-secret/secret
{{- if and (gt (int $values.gpu.count) 0) (not (get $values.settings "device")) }}
# An image without CUDA must not compute on the processor of a node with GPUs.
device: cuda
{{- end }}
kv_cache_config:
  {{- with $cache }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  kv_events_config:
    {{- toYaml $events | nindent 4 }}
cache_transceiver_config:
  {{- toYaml $transceiver | nindent 2 }}
{{- end -}}

{{- define "kvmesh.config.indexer" -}}
port: 8300
match_endpoint: tcp://*:8301
# For a container that is started again in its pod; what was missed since is replayed by the servers.
snapshot_path: /var/lib/kvmesh/index/index.snapshot
coordinator_url: {{ include "kvmesh.coordinatorUrls" (index . 0) | quote }}
{{- end -}}

{{/* How the coordinator shows an external etcd who it is. */}}
{{- define "kvmesh.etcdAccess" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- with .Values.etcd.tls -}}
{{- if .existingSecret -}}
etcd_tls:
  ca_file: /etc/kvmesh/etcd-tls/ca.crt
  {{- if .clientCertificate }}
  cert_file: /etc/kvmesh/etcd-tls/tls.crt
  key_file: /etc/kvmesh/etcd-tls/tls.key
  {{- end }}
  {{- with .serverName }}
  server_name: {{ . }}
  {{- end }}
{{ else if or .clientCertificate .serverName -}}
{{- fail "etcd.tls.existingSecret must name the Secret that has the ca.crt for etcd.tls.serverName and etcd.tls.clientCertificate" -}}
{{- end -}}
{{- end -}}
{{- with .Values.etcd.auth -}}
{{- if .user -}}
{{- if not .existingSecret -}}
{{- fail "etcd.auth.existingSecret must name the Secret that has the password of etcd.auth.user" -}}
{{- end -}}
etcd_user: {{ .user | quote }}
etcd_password_file: /etc/kvmesh/etcd-auth/password
{{- else if .existingSecret -}}
{{- fail "etcd.auth.user must name the user whose password etcd.auth.existingSecret has" -}}
{{- end -}}
{{- end -}}
{{- else if or .Values.etcd.tls.existingSecret .Values.etcd.auth.user -}}
{{- fail "etcd.tls and etcd.auth are for etcd.mode external; the bundled etcd has certificates with tls.enabled" -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.etcdMounts" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- if .Values.etcd.tls.existingSecret }}
- {name: etcd-tls, mountPath: /etc/kvmesh/etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.etcd.auth.user }}
- {name: etcd-auth, mountPath: /etc/kvmesh/etcd-auth, readOnly: true}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.etcdVolumes" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- if .Values.etcd.tls.existingSecret }}
- name: etcd-tls
  secret:
    secretName: {{ .Values.etcd.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if .Values.etcd.auth.user }}
- name: etcd-auth
  secret:
    secretName: {{ .Values.etcd.auth.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .Values.etcd.auth.key }}, path: password}]
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.config.coordinator" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values.coordinator -}}
port: 8400
{{- with include "kvmesh.etcdEndpoints" $root }}
etcd_endpoints: {{ . }}
{{- with include "kvmesh.etcdAccess" $root }}
{{ . }}
{{- end }}
{{- if not (get $values.settings "cluster_name") }}
# An external etcd may have several meshes.
cluster_name: {{ $root.Release.Namespace }}.{{ include "kvmesh.fullname" $root }}
{{- end }}
{{- end }}
{{- if ne $root.Values.discovery "none" }}
discovery:
  {{- range $component := list "context" "generation" }}
  {{- $service := printf "%s-%s" (include "kvmesh.fullname" $root) $component }}
  {{- if eq $root.Values.discovery "dns" }}
  - {type: dns, name: {{ $service }}, port: {{ include "kvmesh.workerPort" $component }}, role: {{ $component }}}
  {{- else }}
  - {type: endpointslice, service: {{ $service }}, port: http, role: {{ $component }}}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
