{{- define "floe.name" -}}
{{- if contains "floe" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-floe" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "floe.selector" -}}
app.kubernetes.io/name: floe
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "floe.labels" -}}
{{ include "floe.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "floe.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "floe.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end }}

{{- define "floe.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "floe.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "floe.mounts" -}}
- {name: config, mountPath: {{ printf "/etc/floe/%s" .file }}, subPath: {{ .file }}, readOnly: true}
{{- if .root.Values.credentialsSecret }}
- {name: credentials, mountPath: /etc/floe/credentials, readOnly: true}
{{- end }}
- {name: spool, mountPath: /var/cache/floe}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "floe.volumes" -}}
- name: config
  configMap: {name: {{ include "floe.name" .root }}}
{{- with .root.Values.credentialsSecret }}
- name: credentials
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
# Nothing in it is needed to go on.
- name: spool
  emptyDir: {sizeLimit: {{ .spoolSize }}}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "floe.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
