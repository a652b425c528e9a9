{{- /* Port of /metrics alone, or nothing: as set, or 9090 where the public port would demand a key of the scraper. */ -}}
{{- define "tilewire.metricsPort" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $isOpen := regexMatch "(^|,) *metrics *(,|$)" ($settings.TILEWIRE_KEYLESS | default "") -}}
{{- if $settings.TILEWIRE_METRICS_PORT -}}
{{ $settings.TILEWIRE_METRICS_PORT }}
{{- else if and .Values.apiKeysSecret (not $isOpen) -}}
9090
{{- end -}}
{{- end -}}
{{- /* `settings`, and those that follow from other values. */ -}}
{{- define "tilewire.settings" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $all := dict -}}
{{- if .Values.grpc.enabled -}}
{{- $_ := set $all "TILEWIRE_GRPC_PORT" (.Values.grpc.port | toString) -}}
{{- end -}}
{{- with include "tilewire.metricsPort" . -}}
{{- $_ := set $all "TILEWIRE_METRICS_PORT" . -}}
{{- $_ := set $all "TILEWIRE_METRICS_HOST" ($settings.TILEWIRE_HOST | default "0.0.0.0") -}}
{{- end -}}
{{- toYaml (merge (deepCopy $settings) $all) -}}
{{- end -}}
{{- /* Seconds in which engines let go of pinned arenas: 1 for each 4 GiB and device. Fractions are within what is spare below. */ -}}
{{- define "tilewire.unpinSeconds" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $arena := $settings.TILEWIRE_ARENA_BYTES | default "0" | lower | nospace -}}
{{- $number := regexFind "^[0-9.]+" $arena | float64 -}}
{{- $units := dict "kb" 1e3 "mb" 1e6 "gb" 1e9 "tb" 1e12 "kib" 1024 "mib" 1048576 "gib" 1073741824 "tib" 1099511627776 -}}
{{- $unit := get $units (regexFind "[a-z]+$" $arena) | default 1 -}}
{{- $engines := len (splitList "," ($settings.TILEWIRE_DEVICE | default "")) -}}
{{- divf (mulf $number $unit $engines) 4294967296 | floor | int -}}
{{- end -}}
{{- /* Seconds from the deletion of a pod to SIGKILL: 5 for load balancers to forget it, the drain, 5 for each kind of process, the arenas, 5 to
  spare. */ -}}
{{- define "tilewire.graceSeconds" -}}
{{- $settings := .Values.settings | default dict -}}
{{- add 20 ($settings.TILEWIRE_DRAIN_TIMEOUT_S | default "30" | float64 | ceil | int) (include "tilewire.unpinSeconds" .) -}}
{{- end -}}
