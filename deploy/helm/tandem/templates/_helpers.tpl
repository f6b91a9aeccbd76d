{{- define "tandem.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Of its metrics. The rules know clusters by jobs that begin so. */}}
{{- define "tandem.job" -}}
{{- $name := include "tandem.name" . -}}
{{ if hasPrefix "tandem" $name }}{{ $name }}{{ else }}tandem-{{ $name }}{{ end }}
{{- end }}

{{/* Of a pool or the router: dict "root" $ "role" "prefill" */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Pods that are nodes, of either role. */}}
{{- define "tandem.nodes" -}}
matchLabels:
  app.kubernetes.io/name: tandem
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}
{{- end }}

{{- define "tandem.joinSecret" -}}
{{ .Values.joinToken.existingSecret | default (printf "%s-join" (include "tandem.name" .)) }}
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What every pod is and has, but for its containers: dict "root" $ "of" .Values.router "role" "router" */}}
{{- define "tandem.pod" -}}
serviceAccountName: {{ include "tandem.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
# Drain, the two seconds after it, and the time in which others learn that the pod goes.
terminationGracePeriodSeconds: {{ add (div .of.drainMs 1000) 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
initContainers:
  # Fetches the model where it is not there, and checks it by its SHA-256.
  - name: model
    image: {{ printf "%s:%s" .root.Values.model.image.repository .root.Values.model.image.tag }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: [/models, {{ .root.Values.model.file | quote }}, {{ .root.Values.model.sha256 | quote }}]
    securityContext: {{ include "tandem.containerSecurity" . | nindent 6 }}
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {memory: 1Gi}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
volumes:
  - name: models
    {{- if .root.Values.model.existingClaim }}
    persistentVolumeClaim: {claimName: {{ .root.Values.model.existingClaim | quote }}}
    {{- else if .root.Values.model.hostPath }}
    hostPath: {path: {{ .root.Values.model.hostPath | quote }}, type: Directory}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: tmp
    emptyDir: {}
  - name: join-token
    secret:
      secretName: {{ include "tandem.joinSecret" .root }}
      items: [{key: {{ .root.Values.joinToken.key | quote }}, path: join-token}]
  {{- with index .root.Values.nodeTls .role }}
  - name: node-tls
    secret: {secretName: {{ . | quote }}}
  {{- end }}
  {{- if eq .role "router" }}
  {{- with (.of.apiKeys).secret }}
  - name: api-keys
    secret: {secretName: {{ . | quote }}}
  {{- end }}
  {{- with (.of.tls).secret }}
  - name: tls
    secret: {secretName: {{ . | quote }}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Flags of a router's client ports: keys and TLS, if there are to be any. */}}
{{- define "tandem.clients" -}}
{{- with .Values.router.apiKeys }}
{{- if .secret }}
- --api-keys=/run/secrets/tandem-keys{{ with .file }}/{{ . }}{{ end }}
{{- else if .file }}{{ fail "router.apiKeys.file: of which secret?" }}
{{- end }}
{{- end }}
{{- with .Values.router.tls }}
{{- if .secret }}
- --tls-cert=/run/secrets/tandem-clients/tls.crt
- --tls-key=/run/secrets/tandem-clients/tls.key
{{- if .clientCa }}
- --tls-client-ca=/run/secrets/tandem-clients/ca.crt
{{- end }}
{{- else if .clientCa }}{{ fail "router.tls.clientCa: of which secret?" }}
{{- end }}
{{- if and .secret $.Values.inferencePool.enabled }}{{ fail "inferencePool: a gateway calls its endpoint without TLS; leave router.tls out" }}{{ end }}
{{- end }}
{{- end }}

{{/* Flags of TLS between routers and nodes, if there is to be any: dict "root" $ "role" "router" */}}
{{- define "tandem.nodeTls" -}}
{{- $tls := .root.Values.nodeTls }}
{{- if or $tls.router $tls.prefill $tls.decode }}
{{- if not (and $tls.router $tls.prefill $tls.decode) }}{{ fail "nodeTls: a secret for each of router, prefill and decode, or none" }}{{ end }}
- --node-tls-cert=/run/secrets/tandem-tls/tls.crt
- --node-tls-key=/run/secrets/tandem-tls/tls.key
- --node-tls-ca=/run/secrets/tandem-tls/ca.crt
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- {name: models, mountPath: /models, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: join-token, mountPath: /run/secrets/tandem, readOnly: true}
{{- with index .root.Values.nodeTls .role }}
- {name: node-tls, mountPath: /run/secrets/tandem-tls, readOnly: true}
{{- end }}
{{- if eq .role "router" }}
{{- if (.root.Values.router.apiKeys).secret }}
- {name: api-keys, mountPath: /run/secrets/tandem-keys, readOnly: true}
{{- end }}
{{- if (.root.Values.router.tls).secret }}
- {name: tls, mountPath: /run/secrets/tandem-clients, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
