{{/* What every object's name begins with. */}}
{{- define "semel.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains "semel" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-semel" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels of an object: root, component, and group where it has one. */}}
{{- define "semel.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "semel.selector" . }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that a Deployment selects by; they never change. */}}
{{- define "semel.selector" -}}
app.kubernetes.io/name: semel
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
semel-group: {{ . }}
{{- end }}
{{- end }}

{{- define "semel.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .program -}}
{{- with get $image.digests .program }}@{{ . }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* A group with what holds for all of them: root and name. */}}
{{- define "semel.group" -}}
{{- $values := .root.Values -}}
{{- $group := required (printf "groups.%s: there is no such group" .name) (get $values.groups .name) -}}
{{- $secret := required (printf "groups.%s.secret: name the secret that holds the URLs of this database" .name) $group.secret -}}
{{- $merged := dict "name" .name "secret" $secret "caSecret" ($group.caSecret | default "") -}}
{{- $_ := set $merged "keys" (mergeOverwrite (deepCopy $values.database.keys) (deepCopy ($group.keys | default dict))) -}}
{{- $_ := set $merged "roles" (mergeOverwrite (deepCopy $values.database.roles) (deepCopy ($group.roles | default dict))) -}}
{{- $_ := set $merged "relay" (mergeOverwrite (deepCopy $values.relay) (deepCopy ($group.relay | default dict))) -}}
{{- $_ := set $merged "reaper" (mergeOverwrite (deepCopy $values.reaper) (deepCopy ($group.reaper | default dict))) -}}
{{- $merged | toJson -}}
{{- end }}

{{- define "semel.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: { drop: [ALL] }
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "semel.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Mounted secrets: a list of name, secret, and, where it is not the whole, key. */}}
{{- define "semel.mounts" -}}
volumeMounts:
  {{- range . }}
  - { name: {{ .name }}, mountPath: /etc/semel/{{ .name }}, readOnly: true }
  {{- end }}
{{- end }}
{{- define "semel.volumes" -}}
volumes:
  {{- range . }}
  - name: {{ .name }}
    secret:
      secretName: {{ .secret }}
      {{- with .key }}
      items: [{ key: {{ . }}, path: {{ . }} }]
      {{- end }}
  {{- end }}
{{- end }}

{{/*
A daemon's Deployment, its account and its disruption budget. Takes root, component, group, program, name, replicas (none where an
autoscaler sets it), most (whether there may be more than one), values (env, resources), env and mounts, and ports beside admin.
*/}}
{{- define "semel.daemon" -}}
{{- $root := .root -}}
{{- $labels := dict "root" .root "component" .component "group" .group -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  labels: {{ include "semel.labels" $labels | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels: {{ include "semel.labels" $labels | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" .replicas) }}
  replicas: {{ .replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  selector:
    matchLabels: {{ include "semel.selector" $labels | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: { maxSurge: 1, maxUnavailable: 0 }
  template:
    metadata:
      labels:
        {{- include "semel.labels" $labels | nindent 8 }}
        {{- with $root.Values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ .component }}
        {{- with $root.Values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ .name }}
      {{- include "semel.podSecurity" $root | nindent 6 }}
      # What is slept away before SIGTERM, what work in flight gets, and time to leave.
      terminationGracePeriodSeconds: {{ add $root.Values.preStopSeconds $root.Values.graceSeconds 5 }}
      topologySpreadConstraints:
        {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{ include "semel.selector" $labels | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "semel.image" . }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          {{- include "semel.containerSecurity" $root | nindent 10 }}
          env:
            - { name: SEMEL_ADMIN_LISTEN, value: "0.0.0.0:9090" }
            - { name: SEMEL_GRACE, value: {{ $root.Values.graceSeconds | quote }} }
            - { name: SEMEL_LOG, value: {{ $root.Values.logFilter | quote }} }
            {{- range .env }}
            - { name: {{ .name }}, value: {{ .value | toString | quote }} }
            {{- end }}
            {{- range $name, $value := .values.env }}
            - { name: {{ $name }}, value: {{ $value | toString | quote }} }
            {{- end }}
          ports:
            {{- range .ports }}
            - { name: {{ .name }}, containerPort: {{ .port }}, protocol: TCP }
            {{- end }}
            - { name: admin, containerPort: 9090, protocol: TCP }
          livenessProbe:
            httpGet: { path: /livez, port: admin }
            initialDelaySeconds: 10
            periodSeconds: 10
            timeoutSeconds: 3
            failureThreshold: 3
          readinessProbe:
            httpGet: { path: /readyz, port: admin }
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: 2
          lifecycle:
            preStop:
              sleep: { seconds: {{ $root.Values.preStopSeconds }} }
          resources: {{ toYaml .values.resources | nindent 12 }}
          {{- include "semel.mounts" .mounts | nindent 10 }}
      {{- include "semel.volumes" .mounts | nindent 6 }}
{{- if .most }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{ include "semel.labels" $labels | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{ include "semel.selector" $labels | nindent 6 }}
{{- end }}
{{- end }}

{{/* Whether there are payments: something, or nothing. What the provider needs is there, and nothing of the other one. */}}
{{- define "semel.pays" -}}
{{- $provider := .Values.provider -}}
{{- if eq $provider.kind "grpc" -}}
{{- $_ := required "provider.url: say where the provider is" $provider.url -}}
{{- else if or $provider.url $provider.caSecret -}}
{{- fail "provider.url and provider.caSecret are for provider.kind grpc" -}}
{{- end -}}
{{- if eq $provider.kind "stripe" -}}
{{- $_ := required "provider.stripe.secret: name the secret that holds the account's API key" $provider.stripe.secret -}}
{{- else if or $provider.stripe.secret $provider.stripe.webhookKey -}}
{{- fail "provider.stripe is for provider.kind stripe" -}}
{{- end -}}
{{- if ne $provider.kind "none" }}yes{{ end -}}
{{- end }}

{{/* Settings of whoever makes payments or drives them on. */}}
{{- define "semel.providerEnv" -}}
{{- $provider := .Values.provider -}}
- { name: SEMEL_NAMESPACE, value: {{ required "namespace: choose this deployment's name; it never changes" .Values.namespace | quote }} }
- { name: SEMEL_API_KEY_RETENTION_HOURS, value: {{ .Values.api.keyRetentionHours | quote }} }
- { name: SEMEL_API_PROBLEM_BASE_URL, value: {{ .Values.api.problemBaseUrl | quote }} }
{{- if include "semel.pays" . }}
- { name: SEMEL_PROVIDER, value: {{ $provider.kind }} }
- { name: SEMEL_SEND_WINDOW, value: {{ $provider.sendWindowSeconds | quote }} }
{{- if eq $provider.kind "stripe" }}
- { name: SEMEL_STRIPE_API_KEY_FILE, value: /etc/semel/stripe/{{ $provider.stripe.keys.api }} }
- { name: SEMEL_STRIPE_LIVEMODE, value: {{ $provider.stripe.livemode | quote }} }
{{- else }}
- { name: SEMEL_PROVIDER_URL, value: {{ $provider.url | quote }} }
- { name: SEMEL_PROVIDER_HORIZON_HOURS, value: {{ $provider.horizonHours | quote }} }
{{- if $provider.caSecret }}
- { name: SEMEL_PROVIDER_CA_FILE, value: /etc/semel/provider-ca/ca.crt }
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "semel.brokerEnv" -}}
{{- $broker := .root.Values.broker -}}
- { name: AMQP_URL_FILE, value: /etc/semel/broker/{{ .key }} }
- { name: SEMEL_EXCHANGE, value: {{ $broker.exchange | quote }} }
- { name: SEMEL_TOPOLOGY, value: {{ $broker.topology }} }
{{- if $broker.caSecret }}
- { name: AMQP_CA_FILE, value: /etc/semel/broker-ca/ca.crt }
{{- end }}
{{- end }}

{{/* Mounts: root, group, the key in its secret, and whether broker (with the key in its secret) and provider are reached. */}}
{{- define "semel.secrets" -}}
{{- $values := .root.Values -}}
{{- $mounts := list (dict "name" "database" "secret" .group.secret "key" .key) -}}
{{- with .group.caSecret }}{{ $mounts = append $mounts (dict "name" "database-ca" "secret" .) }}{{ end -}}
{{- with .broker -}}
{{- $secret := required "broker.secret: name the secret that holds the broker's URLs" $values.broker.secret -}}
{{- $mounts = append $mounts (dict "name" "broker" "secret" $secret "key" .) -}}
{{- with $values.broker.caSecret }}{{ $mounts = append $mounts (dict "name" "broker-ca" "secret" .) }}{{ end -}}
{{- end -}}
{{- if and .provider (include "semel.pays" .root) -}}
{{- with $values.provider.caSecret }}{{ $mounts = append $mounts (dict "name" "provider-ca" "secret" .) }}{{ end -}}
{{- with $values.provider.stripe.secret }}{{ $mounts = append $mounts (dict "name" "stripe" "secret" . "key" $values.provider.stripe.keys.api) }}{{ end -}}
{{- end -}}
{{- $mounts | toJson -}}
{{- end }}
