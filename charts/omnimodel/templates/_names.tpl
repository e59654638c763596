{{- /* Name of everything in the release's namespace. */ -}}
{{- define "omnimodel.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Name of the Secret with the token of the agents of its namespace; the operator makes it of OMNI_RELEASE. */ -}}
{{- define "omnimodel.tokenSecret" -}}
{{- printf "%s-agents" (include "omnimodel.name" .) -}}
{{- end -}}

{{- /* Name of what belongs to the whole cluster: another release has another. */ -}}
{{- define "omnimodel.clusterName" -}}
{{- printf "%s.%s.omnimodel.io" (include "omnimodel.name" .) .Release.Namespace -}}
{{- end -}}

{{- define "omnimodel.selector" -}}
app.kubernetes.io/name: omnimodel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omnimodel.labels" -}}
{{ include "omnimodel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: omnimodel
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* An image reference; takes a list: the root context, and the image's values. */ -}}
{{- define "omnimodel.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* The namespaces that may have pools, as a JSON list. */ -}}
{{- define "omnimodel.agentNamespaces" -}}
{{- if .Values.agent.namespaces -}}
{{- range .Values.agent.namespaces -}}
{{- if and $.Values.namespaces (not (has . $.Values.namespaces)) -}}
{{- fail (printf "agent.namespaces: %s is not in namespaces: nobody would look after its pools; add it there" .) -}}
{{- end -}}
{{- end -}}
{{- .Values.agent.namespaces | sortAlpha | uniq | toJson -}}
{{- else if .Values.namespaces -}}
{{- .Values.namespaces | sortAlpha | uniq | toJson -}}
{{- else -}}
{{- list .Release.Namespace | toJson -}}
{{- end -}}
{{- end -}}

{{- /* Names of the service accounts that pods of pools may run under, as a JSON list: the chart makes the first. */ -}}
{{- define "omnimodel.agentAccounts" -}}
{{- prepend .Values.agent.moreServiceAccountNames .Values.agent.serviceAccountName | uniq | toJson -}}
{{- end -}}

{{- /* The agents of every namespace as subjects of a binding. */ -}}
{{- define "omnimodel.agentSubjects" -}}
{{- range $namespace := include "omnimodel.agentNamespaces" . | fromJsonArray }}
{{- range include "omnimodel.agentAccounts" $ | fromJsonArray }}
- {kind: ServiceAccount, name: {{ . }}, namespace: {{ $namespace }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* What pod security level "restricted" asks of a pod, and of a container. */ -}}
{{- define "omnimodel.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "omnimodel.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Where pods go: takes a list: the root context, the component's name, and its values. */ -}}
{{- define "omnimodel.scheduling" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "omnimodel.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ index $ 1 }}
  {{- end }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
