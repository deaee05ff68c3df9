# Writes the hardware counters of this node's EFA devices where node-exporter's textfile collector reads them.
# Arguments: folder of the InfiniBand devices, file to write, seconds between two readings (0: once).
# node-exporter itself reads the counters of other vendors' devices only.
set -eu
devices=$1 file=$2 seconds=$3

amazon() {
    [ "$(cat "$1/device/vendor" 2>/dev/null)" = 0x1d0f ]
}

# All series of a metric have to stand together, so counters are the outer loop.
collect() {
    for counter in tx_bytes rx_bytes tx_pkts rx_pkts rx_drops send_bytes recv_bytes \
        rdma_read_bytes rdma_write_bytes rdma_write_recv_bytes retrans_bytes retrans_pkts \
        retrans_timeout_events unresponsive_remote_events impaired_remote_conn_events; do
        typed=
        for device in "$devices"/*; do
            amazon "$device" || continue
            for port in "$device"/ports/*; do
                value=$(cat "$port/hw_counters/$counter" 2>/dev/null) || continue
                if [ -z "$typed" ]; then
                    echo "# TYPE node_amazonefa_$counter counter"
                    typed=yes
                fi
                echo "node_amazonefa_$counter{device=\"${device##*/}\",port=\"${port##*/}\"} $value"
            done
        done
    done
}

while :; do
    # Renamed into place: a reader sees the old file or the new one.
    collect >"$file.new"
    mv "$file.new" "$file"
    [ "$seconds" = 0 ] && break
    sleep "$seconds"
done
