export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
s() { echo "=== $1 at $SECONDS"; }
s tests; timeout -s KILL 110 python3 -m pytest tests/gpu -q -x -p no:cacheprovider -p no:randomly 2>&1 | tail -15
s ablation
timeout -s KILL 190 python3 - <<'P' 2>&1 | grep -v Warning | tail -40
import bench.gpu.ablation as a
a.emit("environment", **a.environment())
a.measure("all", steps=20, profile=True)
a.measure("float8", steps=20, profile=True, model__float8=True)
off = a.SWITCHES["weights stay gathered"]()
a.measure("general", steps=12)
a.measure("general float8", steps=12, model__float8=True)
off()
a.measure("all again", steps=12)
P
s checkpoint; timeout -s KILL 150 python3 -m bench.gpu.checkpoint 2>&1 | grep -v Warning | tail -12
s memory1; timeout -s KILL 70 python3 -c "
import bench.gpu.memory as m
m.ONE = m.ONE[2:4]
m.main('one')" 2>&1 | tail -6
s memory8; timeout -s KILL 70 python3 -c "
import bench.gpu.memory as m
m.EIGHT = [(20480,2048,2,True),(24576,2048,'full',True),(22528,2048,2,True)]
m.main('eight')" 2>&1 | tail -8
s end
