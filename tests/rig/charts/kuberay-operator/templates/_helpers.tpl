{{- define "operator.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "operator.namespaces" -}}
{{- if .Values.watchNamespace }}{{ join "," .Values.watchNamespace }}
{{- else if .Values.singleNamespaceInstall }}{{ .Release.Namespace }}
{{- end }}
{{- end }}

{{/* The rules that the operator's own source declares; the rig copies them here from the module that it builds. */}}
{{- define "operator.rules" -}}
{{- $source := .Files.Get "files/role.yaml" | fromYaml }}
{{- required "files/role.yaml is missing: use the copy of this chart in the rig's state folder" $source.rules | toYaml }}
{{- end }}
