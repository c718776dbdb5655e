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
{{- if .root.Values.existingSecret }}
- {name: credentials, mountPath: /etc/floe/credentials, readOnly: true}
{{- end }}
- {name: spool, mountPath: /var/cache/floe}
- {name: tmp, mountPath: /tmp}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "floe.volumes" -}}
- name: config
  configMap: {name: {{ include "floe.name" .root }}}
{{- with .root.Values.existingSecret }}
- name: credentials
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
# Nothing in it is needed to go on.
- name: spool
  emptyDir: {sizeLimit: {{ .spoolSize }}}
- name: tmp
  emptyDir: {}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "floe.probes" -}}
# /healthz: 200 if the event loop has turned within 30 seconds; with workers, if none of them hangs. It answers from a
# thread, asks no server, and is 200 while the process waits for one. So only a process that hangs is started again,
# after a minute.
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
# /readyz: 200 if each feed or target works or is a standby; else 503 with the reasons, also while NATS or the store is
# away. A pod that is not ready is not started again; it shows its state, and a rollout waits for it.
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{- /* Of the pods of one service: without a selector of its own, a constraint counts them. */}}
{{- define "floe.spread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "floe.selector" . | fromYaml)) }}
{{- with .root.Values.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
  - {{- hasKey . "labelSelector" | ternary . (merge (deepCopy .) $selector) | toYaml | nindent 4 }}
{{- end }}
{{- end }}
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
