# One container of the cluster: `start.sh controller|node|login`. All share one munge key, which the controller makes.
set -euo pipefail
key=/etc/munge/munge.key
if [ "$1" = controller ] && [ ! -s "$key" ]; then
  (umask 077 && head -c 1024 /dev/urandom > "$key.new" && chown munge: "$key.new" && mv "$key.new" "$key")
fi
until [ -s "$key" ]; do sleep 0.2; done
mkdir -p /run/munge /var/spool/slurmctld /var/spool/slurmd
chown munge: /run/munge /etc/munge
runuser -u munge -- munged
case "$1" in
  controller) exec slurmctld -D ;;
  node) exec slurmd -D ;;
  login) exec sleep infinity ;;
esac
