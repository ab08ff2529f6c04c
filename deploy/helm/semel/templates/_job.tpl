{{/* One container of a Job that works as the owner of a group's tables: root, group, name, program, args. */}}
{{- define "semel.ownerContainer" -}}
- name: {{ .name }}
  image: {{ include "semel.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- include "semel.containerSecurity" .root | nindent 2 }}
  args: {{ .args | toJson }}
  env:
    - { name: DATABASE_URL_FILE, value: /etc/semel/database/{{ .group.keys.owner }} }
    - { name: USER, value: helm }
  resources: {{ toYaml .root.Values.migration.resources | nindent 4 }}
  {{- include "semel.mounts" .mounts | nindent 2 }}
{{- end }}

{{/* The pod that migrates a group's database and grants its roles, one after the other. */}}
{{- define "semel.migrationPod" -}}
{{- $values := .root.Values -}}
{{- $group := .group -}}
{{- $program := "semel-relay" -}}
{{- if eq $group.name $values.api.group }}{{ $program = "semel-api" }}
{{- else if and $values.ledger.enabled (eq $group.name $values.ledger.group) }}{{ $program = "semel-ledger" }}{{ end -}}
{{- $mounts := include "semel.secrets" (dict "root" .root "group" $group "key" $group.keys.owner) | fromJsonArray -}}
{{- $container := dict "root" .root "group" $group "mounts" $mounts -}}
{{- $grants := list -}}
{{- $pays := include "semel.pays" .root -}}
{{- range $daemon := list "api" "ledger" "relay" "reaper" -}}
{{- $of := printf "semel-%s" $daemon -}}
{{- if and (get $group.roles $daemon) (or (eq $of $program) (has $daemon (list "relay" "reaper"))) -}}
{{- $args := list "grant" (get $group.roles $daemon) -}}
{{- if and (eq $daemon "reaper") (eq $group.name $values.api.group) $pays }}{{ $args = append $args "--with-payments" }}{{ end -}}
{{- $grants = append $grants (dict "name" (printf "grant-%s" $daemon) "program" $of "args" $args) -}}
{{- end -}}
{{- end -}}
{{- $steps := prepend $grants (dict "name" "migrate" "program" $program "args" (list "migrate")) -}}
metadata:
  labels: {{ include "semel.labels" (dict "root" .root "component" "migrate" "group" $group.name) | nindent 4 }}
spec:
  serviceAccountName: {{ include "semel.fullname" .root }}-migrate
  restartPolicy: Never
  {{- include "semel.podSecurity" .root | nindent 2 }}
  {{- if gt (len $steps) 1 }}
  initContainers:
    {{- range initial $steps }}
    {{- include "semel.ownerContainer" (merge (deepCopy .) $container) | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "semel.ownerContainer" (merge (deepCopy (last $steps)) $container) | nindent 4 }}
  {{- include "semel.volumes" $mounts | nindent 2 }}
{{- end }}

{{/* The pod that makes the first client's credential, unless it has one. */}}
{{- define "semel.credentialPod" -}}
{{- $group := include "semel.group" (dict "root" . "name" .Values.api.group) | fromJson -}}
{{- $mounts := include "semel.secrets" (dict "root" . "group" $group "key" $group.keys.owner) | fromJsonArray -}}
{{- $args := list "credentials" "create" .Values.firstClient "--unless-any" -}}
{{- $container := dict "root" . "group" $group "mounts" $mounts "name" "credential" "program" "semel-api" "args" $args -}}
metadata:
  labels: {{ include "semel.labels" (dict "root" . "component" "migrate" "group" $group.name) | nindent 4 }}
spec:
  serviceAccountName: {{ include "semel.fullname" . }}-migrate
  restartPolicy: Never
  {{- include "semel.podSecurity" . | nindent 2 }}
  containers:
    {{- include "semel.ownerContainer" $container | nindent 4 }}
  {{- include "semel.volumes" $mounts | nindent 2 }}
{{- end }}
{{- define "semel.credentialJob" -}}
{{ include "semel.fullname" . | trunc 28 }}-credential-{{ include "semel.credentialPod" . | sha256sum | trunc 8 }}
{{- end }}
