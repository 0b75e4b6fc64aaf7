{{- define "farsight.labels" -}}
app.kubernetes.io/name: farsight
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "farsight.keys" -}}
{{- if .Values.keyFile.secretName }}{{ .Values.keyFile.secretName }}{{ else }}{{ .Values.apiKey.secretName }}{{ end }}
{{- end }}

{{- define "farsight.toml" -}}
{{- range $table, $settings := .Values.config }}
[{{ $table }}]
{{- range $key, $value := $settings }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}
