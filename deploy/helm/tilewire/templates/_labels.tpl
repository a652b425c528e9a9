{{- define "tilewire.selector" -}}
app.kubernetes.io/name: tilewire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "tilewire.labels" -}}
{{ include "tilewire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}
